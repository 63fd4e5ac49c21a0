// Vectors of a fixed number of lanes, by the compiler's own vector types: every element type has the same number of
// lanes, so mixed-width code needs no shuffles in the generated source. Truth is a 32-bit mask, 0 or -1. Every function
// exists for a vector and for one number, so row values and column values are printed alike.
//
// float32 functions are our own (about one unit in the last place, tested); the rest goes to libm lane by lane.
//
// No header but <stdint.h>: <immintrin.h> and <cmath> would be most of a kernel's compile time. Hence the compiler's
// builtins, which is what the intrinsics are made of.

#include <stdint.h>

#define INLINE static inline __attribute__((always_inline))

namespace {

#if defined(__AVX512F__)
constexpr int L = 16;
#elif defined(__AVX2__) && defined(__FMA__)
constexpr int L = 8;
#else
constexpr int L = 4;
#endif

template <class T>
struct Lanes {
  typedef T type __attribute__((vector_size(sizeof(T) * L)));
};
template <class T>
using V = typename Lanes<T>::type;

typedef V<float> Floats;
typedef V<int32_t> Mask;

template <class T>
INLINE V<T> splat(T x) {
  V<T> r;
  for (int l = 0; l < L; ++l) r[l] = x;
  return r;
}
#define SPLAT_FLOAT(x) (Floats{} + (x))

INLINE Mask iota() {
  Mask r;
  for (int l = 0; l < L; ++l) r[l] = l;
  return r;
}

// ---- memory

template <class T>
INLINE V<T> load(const T *p) {
  V<T> r;
  __builtin_memcpy(&r, p, sizeof r);
  return r;
}
template <class T>
INLINE V<T> load_part(const T *p, int n) {
  V<T> r{};
  __builtin_memcpy(&r, p, sizeof(T) * n);
  return r;
}
template <class T>
INLINE V<T> load_strided(const T *p, int64_t stride, int n) {
  V<T> r{};
  for (int l = 0; l < L; ++l)
    if (l < n) r[l] = p[l * stride];
  return r;
}
template <class T>
INLINE V<T> load_masked(const T *p, int64_t stride, Mask valid, int n) {
  V<T> r{};
  for (int l = 0; l < L; ++l)
    if (l < n && valid[l]) r[l] = p[l * stride];
  return r;
}
template <class T>
INLINE V<T> gather(const T *p, int64_t stride, V<int64_t> extra, Mask valid, int n) {
  V<T> r{};
  for (int l = 0; l < L; ++l)
    if (l < n && valid[l]) r[l] = p[l * stride + extra[l]];
  return r;
}
template <class T>
INLINE void store(T *p, V<T> x) {
  __builtin_memcpy(p, &x, sizeof x);
}
template <class T>
INLINE void store_part(T *p, V<T> x, int n) {
  __builtin_memcpy(p, &x, sizeof(T) * n);
}
template <class T>
INLINE void store_strided(T *p, int64_t stride, V<T> x, int n) {
  for (int l = 0; l < L; ++l)
    if (l < n) p[l * stride] = x[l];
}

// A data-dependent position, kept inside its table whatever the data says.
INLINE int64_t clamped(int64_t x, int64_t size) { return x < 0 ? 0 : x >= size ? size - 1 : x; }
INLINE V<int64_t> clamped(V<int64_t> x, int64_t size) {
  for (int l = 0; l < L; ++l) x[l] = clamped(int64_t(x[l]), size);
  return x;
}

// ---- truth

INLINE int32_t as_mask(bool x) { return -int32_t(x); }
INLINE int32_t as_mask(int x) { return -int32_t(x != 0); }
template <class X>
INLINE Mask as_mask(X x) {
  return __builtin_convertvector(x, Mask);
}
INLINE Mask first_lanes(int n) { return as_mask(iota() < n); }
INLINE int32_t inside(int64_t x, int64_t low, int64_t high) { return as_mask(low <= x && x < high); }
INLINE Mask inside(int64_t x, int64_t stride, int64_t low, int64_t high) {
  Mask r;
  for (int l = 0; l < L; ++l) r[l] = -int32_t(low <= x + l * stride && x + l * stride < high);
  return r;
}

template <int bytes>
struct Signed;
template <>
struct Signed<1> { typedef int8_t type; };
template <>
struct Signed<2> { typedef int16_t type; };
template <>
struct Signed<4> { typedef int32_t type; };
template <>
struct Signed<8> { typedef int64_t type; };

template <class T>
INLINE T op_where(int32_t m, T a, T b) {
  return m ? a : b;
}
template <class X>
INLINE X op_where(Mask m, X a, X b) {
  typedef V<typename Signed<sizeof(X) / L>::type> Wide;
  return __builtin_convertvector(m, Wide) ? a : b;
}

// ---- conversions

INLINE float from_bfloat16(uint16_t x) {
  uint32_t bits = uint32_t(x) << 16;
  float r;
  __builtin_memcpy(&r, &bits, 4);
  return r;
}
#if defined(__AVX512F__)
INLINE V<uint32_t> widen_bits(V<uint16_t> x) {
  return (V<uint32_t>)__builtin_ia32_pmovzxwd512_mask((V<int16_t>)x, V<int32_t>{}, -1);
}
#elif defined(__AVX2__) && defined(__FMA__)
INLINE V<uint32_t> widen_bits(V<uint16_t> x) { return (V<uint32_t>)__builtin_ia32_pmovzxwd256((V<int16_t>)x); }
#else
INLINE V<uint32_t> widen_bits(V<uint16_t> x) { return __builtin_convertvector(x, V<uint32_t>); }
#endif
INLINE Floats from_bfloat16(V<uint16_t> x) { return (Floats)(widen_bits(x) << 16); }

INLINE V<uint16_t> to_bfloat16(Floats x) {
  V<uint32_t> bits = (V<uint32_t>)x;
  V<uint32_t> rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  return __builtin_convertvector((x != x) ? V<uint32_t>{} + 0x7fc0 : rounded, V<uint16_t>);
}
INLINE uint16_t to_bfloat16(float x) { return to_bfloat16(SPLAT_FLOAT(x))[0]; }

#if defined(__AVX512F__)
INLINE Floats from_float16(V<uint16_t> x) {
  return __builtin_ia32_vcvtph2ps512_mask((V<int16_t>)x, Floats{}, -1, 4);
}
INLINE V<uint16_t> to_float16(Floats x) {
  return (V<uint16_t>)__builtin_ia32_vcvtps2ph512_mask(x, 8, V<int16_t>{}, -1);
}
#elif defined(__F16C__) && defined(__AVX2__)
INLINE Floats from_float16(V<uint16_t> x) { return __builtin_ia32_vcvtph2ps256((V<int16_t>)x); }
INLINE V<uint16_t> to_float16(Floats x) { return (V<uint16_t>)__builtin_ia32_vcvtps2ph256(x, 8); }
#else
INLINE Floats from_float16(V<uint16_t> x) {
  Floats r;
  for (int l = 0; l < L; ++l) {
    _Float16 h;
    uint16_t bits = x[l];
    __builtin_memcpy(&h, &bits, 2);
    r[l] = float(h);
  }
  return r;
}
INLINE V<uint16_t> to_float16(Floats x) {
  V<uint16_t> r;
  for (int l = 0; l < L; ++l) {
    _Float16 h = _Float16(x[l]);
    uint16_t bits;
    __builtin_memcpy(&bits, &h, 2);
    r[l] = bits;
  }
  return r;
}
#endif
INLINE float from_float16(uint16_t x) { return from_float16(splat(x))[0]; }
INLINE uint16_t to_float16(float x) { return to_float16(SPLAT_FLOAT(x))[0]; }

template <class To, class From>
INLINE V<To> convert_lanes(From x) {
  return __builtin_convertvector(x, V<To>);
}
template <class X>
INLINE Mask mask_lanes(X x) {
  return as_mask(x != 0);
}
template <class To>
INLINE V<To> from_mask(Mask m) {
  return __builtin_convertvector(-m, V<To>);
}

// ---- arithmetic

#if defined(__AVX512F__)
INLINE Floats fused(Floats a, Floats b, Floats c) { return __builtin_ia32_vfmaddps512_mask(a, b, c, -1, 4); }
INLINE Floats op_sqrt(Floats x) { return __builtin_ia32_sqrtps512_mask(x, Floats{}, -1, 4); }
#define ROUNDED(mode, f) __builtin_ia32_rndscaleps_mask(x, mode, Floats{}, -1, 4)
#elif defined(__AVX2__) && defined(__FMA__)
INLINE Floats fused(Floats a, Floats b, Floats c) { return __builtin_ia32_vfmaddps256(a, b, c); }
INLINE Floats op_sqrt(Floats x) { return __builtin_ia32_sqrtps256(x); }
#define ROUNDED(mode, f) __builtin_ia32_roundps256(x, mode)
#else
INLINE Floats fused(Floats a, Floats b, Floats c) {
  Floats r;
  for (int l = 0; l < L; ++l) r[l] = __builtin_fmaf(a[l], b[l], c[l]);
  return r;
}
INLINE Floats op_sqrt(Floats x) {
  for (int l = 0; l < L; ++l) x[l] = __builtin_sqrtf(x[l]);
  return x;
}
#define ROUNDED(mode, f) each(x, [](float y) { return f(y); })
template <class F>
INLINE Floats each(Floats x, F f) {
  for (int l = 0; l < L; ++l) x[l] = f(x[l]);
  return x;
}
#endif
INLINE float op_sqrt(float x) { return __builtin_sqrtf(x); }
INLINE double op_sqrt(double x) { return __builtin_sqrt(x); }

#define ROUNDING(name, mode, single, wide)                       \
  INLINE Floats name(Floats x) { return ROUNDED(mode, single); } \
  INLINE float name(float x) { return single(x); }               \
  INLINE double name(double x) { return wide(x); }
ROUNDING(op_floor, 9, __builtin_floorf, __builtin_floor)
ROUNDING(op_ceil, 10, __builtin_ceilf, __builtin_ceil)
ROUNDING(op_trunc, 11, __builtin_truncf, __builtin_trunc)
ROUNDING(op_round, 8, __builtin_nearbyintf, __builtin_nearbyint)

#define ROUND_LANES(name)                                     \
  INLINE V<double> op_##name(V<double> x) {                   \
    V<double> r;                                              \
    for (int l = 0; l < L; ++l) r[l] = op_##name(double(x[l])); \
    return r;                                                 \
  }
ROUND_LANES(floor)
ROUND_LANES(ceil)
ROUND_LANES(trunc)
ROUND_LANES(round)
ROUND_LANES(sqrt)

template <class T>
INLINE T op_add(T a, T b) { return a + b; }
template <class T>
INLINE T op_sub(T a, T b) { return a - b; }
template <class T>
INLINE T op_mul(T a, T b) { return a * b; }
template <class T>
INLINE T op_div(T a, T b) { return a / b; }
template <class T>
INLINE T op_neg(T a) { return -a; }
template <class T>
INLINE T op_and(T a, T b) { return a & b; }
template <class T>
INLINE T op_or(T a, T b) { return a | b; }
template <class T>
INLINE T op_xor(T a, T b) { return a ^ b; }
template <class T>
INLINE T op_not(T a) { return ~a; }
template <class T>
INLINE auto op_eq(T a, T b) { return as_mask(a == b); }
template <class T>
INLINE auto op_ne(T a, T b) { return as_mask(a != b); }
template <class T>
INLINE auto op_lt(T a, T b) { return as_mask(a < b); }
template <class T>
INLINE auto op_le(T a, T b) { return as_mask(a <= b); }
template <class T>
INLINE auto op_gt(T a, T b) { return as_mask(a > b); }
template <class T>
INLINE auto op_ge(T a, T b) { return as_mask(a >= b); }
template <class T>
INLINE auto op_isnan(T a) { return as_mask(a != a); }
template <class T>
INLINE T op_maximum(T a, T b) { return ((a > b) | (a != a)) ? a : b; }
template <class T>
INLINE T op_minimum(T a, T b) { return ((a < b) | (a != a)) ? a : b; }
template <class T>
INLINE T op_reciprocal(T a) { return 1 / a; }
template <class T>
INLINE T op_rsqrt(T a) { return 1 / op_sqrt(a); }
template <class T>
INLINE T op_abs(T a) { return (a < 0) ? -a : a; }
INLINE float op_abs(float a) { return __builtin_fabsf(a); }
INLINE double op_abs(double a) { return __builtin_fabs(a); }
INLINE Floats op_abs(Floats a) { return (Floats)((Mask)a & 0x7fffffff); }
template <class T>
INLINE auto op_isinf(T a) { return as_mask((a == a) & (a - a != a - a)); }
template <class T>
INLINE T op_sign(T a) { return (a > 0) ? (a ^ a) + 1 : (a < 0) ? (a ^ a) - 1 : (a ^ a); }
INLINE float op_sign(float a) { return a > 0 ? 1.f : a < 0 ? -1.f : 0.f; }
INLINE double op_sign(double a) { return a > 0 ? 1. : a < 0 ? -1. : 0.; }
INLINE Floats op_sign(Floats a) { return (a > 0) ? Floats{} + 1.f : (a < 0) ? Floats{} - 1.f : Floats{}; }
INLINE V<double> op_sign(V<double> a) { return (a > 0) ? V<double>{} + 1. : (a < 0) ? V<double>{} - 1. : V<double>{}; }

// ---- float32 functions of our own

INLINE Floats op_exp(Floats x) {
  // 2^n * e^r, |r| <= ln(2)/2; the power in two halves, so that denormal results round once.
  Floats bounded = (x > 89.f) ? SPLAT_FLOAT(89.f) : x;
  bounded = (bounded < -105.f) ? SPLAT_FLOAT(-105.f) : bounded;
  Floats n = fused(bounded, SPLAT_FLOAT(1.44269504f), SPLAT_FLOAT(12582912.f)) - 12582912.f;
  Floats r = fused(n, SPLAT_FLOAT(-0.693145752f), bounded);
  r = fused(n, SPLAT_FLOAT(-1.42860677e-6f), r);
  Floats p = fused(r, SPLAT_FLOAT(0.00138146104f), SPLAT_FLOAT(0.00836871113f));
  p = fused(p, r, SPLAT_FLOAT(0.0416683875f));
  p = fused(p, r, SPLAT_FLOAT(0.166665207f));
  p = fused(p, r, SPLAT_FLOAT(0.499999935f));
  p = fused(p, r * r, r) + 1.f;
  Mask power = __builtin_convertvector(n, Mask);
  Mask half = power >> 1;
  Floats low = (Floats)((half + 127) << 23), high = (Floats)((power - half + 127) << 23);
  return (x != x) ? x : p * low * high;
}
INLINE Floats op_sigmoid(Floats x) { return 1.f / (op_exp(-x) + 1.f); }
INLINE Floats op_tanh(Floats x) {
  Floats a = op_abs(x), s = x * x;
  Floats p = fused(s, SPLAT_FLOAT(-0.00619872605f), SPLAT_FLOAT(0.021020556f));
  p = fused(p, s, SPLAT_FLOAT(-0.0538405192f));
  p = fused(p, s, SPLAT_FLOAT(0.133324806f));
  p = fused(p, s, SPLAT_FLOAT(-0.333333147f));
  Floats small = fused(p * s, x, x);
  Floats large = 1.f - 2.f / (op_exp(a + a) + 1.f);
  large = (Floats)((Mask)large | ((Mask)x & int32_t(0x80000000)));
  return (x != x) ? x : (a < 0.55f) ? small : large;
}
INLINE Floats op_erf(Floats x) {
  // x * P(x^2) / Q(x^2), fitted on [0, 3.92]. At most 6 units in the last place, 0.8 on average; 1 where 1 is nearest.
  Floats s = x * x;
  Floats p = fused(s, SPLAT_FLOAT(2.05009016e-06f), SPLAT_FLOAT(0.000284881417f));
  Floats q = fused(s, SPLAT_FLOAT(3.80916778e-05f), SPLAT_FLOAT(0.00116252428f));
  p = fused(p, s, SPLAT_FLOAT(0.00376557275f));
  q = fused(q, s, SPLAT_FLOAT(0.0149691271f));
  p = fused(p, s, SPLAT_FLOAT(0.0527485823f));
  q = fused(q, s, SPLAT_FLOAT(0.114108696f));
  p = fused(p, s, SPLAT_FLOAT(0.190405485f));
  q = fused(q, s, SPLAT_FLOAT(0.502075208f));
  p = fused(p, s, SPLAT_FLOAT(1.12837915f));
  q = fused(q, s, SPLAT_FLOAT(1.f));
  Floats one = (Floats)(((Mask)x & int32_t(0x80000000)) | int32_t(0x3f800000));
  return (op_abs(x) > 3.84f) ? one : x * p / q;
}
#define ONE_LANE(name) \
  INLINE float name(float x) { return name(SPLAT_FLOAT(x))[0]; }
ONE_LANE(op_exp)
ONE_LANE(op_sigmoid)
ONE_LANE(op_tanh)
ONE_LANE(op_erf)
INLINE double op_sigmoid(double x) { return 1 / (1 + __builtin_exp(-x)); }
INLINE V<double> op_sigmoid(V<double> x) {
  V<double> r;
  for (int l = 0; l < L; ++l) r[l] = op_sigmoid(double(x[l]));
  return r;
}

// ---- libm, lane by lane

#define LIBM_DOUBLE(name)                                                  \
  INLINE double op_##name(double x) { return __builtin_##name(x); }        \
  INLINE V<double> op_##name(V<double> x) {                                \
    for (int l = 0; l < L; ++l) x[l] = __builtin_##name(x[l]);             \
    return x;                                                              \
  }
#define LIBM(name)                                                         \
  LIBM_DOUBLE(name)                                                        \
  INLINE float op_##name(float x) { return __builtin_##name##f(x); }       \
  INLINE Floats op_##name(Floats x) {                                      \
    for (int l = 0; l < L; ++l) x[l] = __builtin_##name##f(x[l]);          \
    return x;                                                              \
  }
LIBM_DOUBLE(exp)
LIBM_DOUBLE(tanh)
LIBM_DOUBLE(erf)
LIBM(exp2)
LIBM(expm1)
LIBM(log)
LIBM(log2)
LIBM(log10)
LIBM(log1p)
LIBM(sin)
LIBM(cos)
LIBM(tan)
LIBM(atan)
LIBM(sinh)
LIBM(cosh)
#define PAIRWISE(name)                                        \
  template <class X>                                          \
  INLINE X name##_lanes(X a, X b) {                           \
    X r;                                                      \
    for (int l = 0; l < L; ++l) r[l] = name##_one(a[l], b[l]); \
    return r;                                                 \
  }
// Integer division by zero has no value in C++; it gives 0 here.
#define FLOATING(T, name)                                                           \
  INLINE T pow_one(T a, T b) { return __builtin_pow##name(a, b); }                  \
  INLINE T atan2_one(T a, T b) { return __builtin_atan2##name(a, b); }              \
  INLINE T fmod_one(T a, T b) { return __builtin_fmod##name(a, b); }                \
  INLINE T remainder_one(T a, T b) {                                                \
    T r = __builtin_fmod##name(a, b);                                               \
    return r != 0 && (b < 0) != (r < 0) ? r + b : r;                                \
  }                                                                                 \
  INLINE T truncdiv_one(T a, T b) { return __builtin_trunc##name(a / b); }          \
  INLINE T floordiv_one(T a, T b) {                                                 \
    if (b == 0) return a / b;                                                       \
    T r = __builtin_fmod##name(a, b), q = (a - r) / b;                              \
    if (r != 0 && (b < 0) != (r < 0)) q -= 1;                                       \
    if (q == 0) return __builtin_copysign##name(T(0), a / b);                       \
    T f = __builtin_floor##name(q);                                                 \
    return q - f > T(0.5) ? f + 1 : f;                                              \
  }
FLOATING(float, f)
FLOATING(double, )
template <class T>
INLINE T floordiv_one(T a, T b) {
  if (b == 0) return 0;
  T q = a / b;
  return q * b != a && (a < 0) != (b < 0) ? q - 1 : q;
}
template <class T>
INLINE T truncdiv_one(T a, T b) { return b == 0 ? 0 : a / b; }
template <class T>
INLINE T fmod_one(T a, T b) { return b == 0 ? 0 : T(a - a / b * b); }
template <class T>
INLINE T remainder_one(T a, T b) {
  T r = fmod_one(a, b);
  return r != 0 && (b < 0) != (r < 0) ? T(r + b) : r;
}
template <class T>
INLINE T pow_one(T a, T b) {
  if (b < 0) return a == 1 ? 1 : a == -1 ? (b % 2 ? -1 : 1) : 0;
  T r = 1;
  for (; b; b /= 2, a *= a)
    if (b % 2) r *= a;
  return r;
}
PAIRWISE(floordiv)
PAIRWISE(truncdiv)
PAIRWISE(fmod)
PAIRWISE(remainder)
PAIRWISE(pow)
PAIRWISE(atan2)

// ---- reductions of lanes

template <class T, class F>
INLINE T fold(V<T> x, F f) {
  typedef V<typename Signed<sizeof(T)>::type> Order;
  Order at;
  for (int l = 0; l < L; ++l) at[l] = l;
  for (int n = L / 2; n; n /= 2) x = f(x, __builtin_shuffle(x, at + n));
  return x[0];
}

// The first largest (or smallest) element and its column; NaN counts as both.
template <class T>
struct Best {
  V<T> value;
  Mask column;
};
constexpr int32_t NO_COLUMN = 0x7fffffff;
template <bool largest, class T>
INLINE void better(Best<T> &best, V<T> x, Mask column, Mask valid) {
  Mask ahead = as_mask(largest ? x > best.value : x < best.value);
  Mask nan = as_mask(x != x) & ~as_mask(best.value != best.value);
  Mask stays = as_mask(best.value != best.value);
  Mask take = valid & (((ahead & ~stays) | nan) | as_mask(best.column == NO_COLUMN));
  best.value = op_where(take, x, best.value);
  best.column = take ? column : best.column;
}
template <bool largest, class T>
INLINE int64_t best_column(const Best<T> &best) {
  int at = 0;
  for (int l = 1; l < L; ++l) {
    if (best.column[l] == NO_COLUMN) continue;
    T x = best.value[l], top = best.value[at];
    bool equal = x == top || (x != x && top != top);
    bool ahead = (x != x && top == top) || (top == top && (largest ? x > top : x < top));
    if (best.column[at] == NO_COLUMN || ahead || (equal && best.column[l] < best.column[at])) at = l;
  }
  return best.column[at] == NO_COLUMN ? 0 : best.column[at];
}

}  // namespace
