// Dot products of a few rows of x with rows of a weight stored [n, k]: the weight is read once, x stays in the cache.

namespace {

INLINE Floats widen(const float *p) { return load(p); }
INLINE Floats widen_part(const float *p, int n) { return load_part(p, n); }

struct BFloat16 {
  uint16_t bits;
};
struct Float16 {
  uint16_t bits;
};
INLINE Floats widen(const BFloat16 *p) { return from_bfloat16(load((const uint16_t *)p)); }
INLINE Floats widen_part(const BFloat16 *p, int n) { return from_bfloat16(load_part((const uint16_t *)p, n)); }
INLINE Floats widen(const Float16 *p) { return from_float16(load((const uint16_t *)p)); }
INLINE Floats widen_part(const Float16 *p, int n) { return from_float16(load_part((const uint16_t *)p, n)); }

// out[m * stride + r] = dot(x[m], w[r]) for M rows of x and R rows of w. U independent sums per product.
template <int M, int R, int U, class W>
INLINE void dots(const float *x, int64_t x_stride, const W *w, int64_t w_stride, int64_t k, float *out, int64_t stride) {
  Floats sums[U][R][M];
  for (int u = 0; u < U; ++u)
    for (int r = 0; r < R; ++r)
      for (int m = 0; m < M; ++m) sums[u][r][m] = Floats{};
  int64_t c = 0;
  for (; c + U * L <= k; c += U * L)
#pragma GCC unroll 8
    for (int u = 0; u < U; ++u) {
      Floats row[M];
#pragma GCC unroll 8
      for (int m = 0; m < M; ++m) row[m] = load(x + m * x_stride + c + u * L);
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) {
        const W *p = w + r * w_stride + c + u * L;
        Floats weight = widen(p);
#pragma GCC unroll 8
        for (int m = 0; m < M; ++m) sums[u][r][m] = fused(weight, row[m], sums[u][r][m]);
      }
    }
  for (; c < k; c += L) {
    const int n = k - c < L ? int(k - c) : L;
    for (int r = 0; r < R; ++r) {
      Floats weight = widen_part(w + r * w_stride + c, n);
      for (int m = 0; m < M; ++m) sums[0][r][m] = fused(weight, load_part(x + m * x_stride + c, n), sums[0][r][m]);
    }
  }
  for (int r = 0; r < R; ++r)
    for (int m = 0; m < M; ++m) {
      Floats total = sums[0][r][m];
      for (int u = 1; u < U; ++u) total += sums[u][r][m];
      out[m * stride + r] = fold<float>(total, [](Floats a, Floats b) { return a + b; });
    }
}

template <int M, int R, int U, class W>
INLINE void columns(const float *x, int64_t x_stride, const W *w, int64_t w_stride, int64_t k, int64_t count, float *out, int64_t stride) {
  int64_t n = 0;
  for (; n + R <= count; n += R) dots<M, R, U>(x, x_stride, w + n * w_stride, w_stride, k, out + n, stride);
  for (; n < count; ++n) dots<M, 1, U>(x, x_stride, w + n * w_stride, w_stride, k, out + n, stride);
}

// x as float32: itself, or copied once.
INLINE const float *as_floats(const float *x, int64_t, int64_t, int64_t, float *) { return x; }
template <class X>
INLINE const float *as_floats(const X *x, int64_t m, int64_t x_stride, int64_t k, float *copy) {
  for (int64_t i = 0; i < m; ++i) {
    int64_t c = 0;
    for (; c + L <= k; c += L) store(copy + i * k + c, widen(x + i * x_stride + c));
    if (c < k) store_part(copy + i * k + c, widen_part(x + i * x_stride + c, int(k - c)), int(k - c));
  }
  return copy;
}

}  // namespace
