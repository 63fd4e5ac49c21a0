"""Matrix times a few vectors: every program owns `BLOCK_N` output columns and streams their weights once.

No tensor cores: with up to four rows of activations the weights' bytes are everything. Partial products accumulate per
element in float32 and are summed across the block at the end.
"""

import triton
import triton.language as tl

from tune_model.tune.triton.kernels.dependency import wait_for_predecessor


@triton.jit
def gemv(
    x,
    w,
    operands,
    m_size,
    x_stride_m,
    N: tl.constexpr,
    K: tl.constexpr,
    W_STRIDE_N: tl.constexpr,
    W_STRIDE_K: tl.constexpr,
    HALVES: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
    UNROLL: tl.constexpr,
    EVICTION: tl.constexpr,
    PDL: tl.constexpr,
    EPILOGUE: tl.constexpr,
):
    """Compute x [m_size <= BLOCK_M, K] times w [N * HALVES, K] transposed; with two halves, both halves' columns."""
    wait_for_predecessor(PDL)
    columns = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    w_columns = columns
    if N * HALVES * K >= 2**31:
        w_columns = columns.to(tl.int64)
    if N % BLOCK_N != 0:
        w_columns = w_columns % N
    ks = tl.arange(0, BLOCK_K)
    rows = tl.arange(0, BLOCK_M)
    if BLOCK_M == 1:
        x_pointers = x + ks[None, :]
        w_pointers = w + w_columns[:, None] * W_STRIDE_N + ks[None, :] * W_STRIDE_K
        acc0 = tl.zeros((BLOCK_N, BLOCK_K), tl.float32)
        acc1 = acc0
        for k in tl.range(0, K, BLOCK_K, num_stages=STAGES, loop_unroll_factor=UNROLL):
            if K % BLOCK_K == 0:
                xs = tl.load(x_pointers + k).to(tl.float32)
                ws = tl.load(w_pointers + k * W_STRIDE_K, eviction_policy=EVICTION)
                acc0 += xs * ws.to(tl.float32)
                if HALVES == 2:
                    us = tl.load(w_pointers + (k * W_STRIDE_K + N * W_STRIDE_N), eviction_policy=EVICTION)
                    acc1 += xs * us.to(tl.float32)
            else:
                inside = (k + ks)[None, :] < K
                xs = tl.load(x_pointers + k, mask=inside, other=0.0).to(tl.float32)
                ws = tl.load(w_pointers + k * W_STRIDE_K, mask=inside, other=0.0, eviction_policy=EVICTION)
                acc0 += xs * ws.to(tl.float32)
                if HALVES == 2:
                    us = tl.load(
                        w_pointers + (k * W_STRIDE_K + N * W_STRIDE_N), mask=inside, other=0.0, eviction_policy=EVICTION
                    )
                    acc1 += xs * us.to(tl.float32)
        sum0 = tl.sum(acc0, axis=1)[None, :]
        sum1 = sum0
        if HALVES == 2:
            sum1 = tl.sum(acc1, axis=1)[None, :]
        EPILOGUE(sum0, sum1, rows[:, None], columns[None, :], m_size, operands)
    else:
        # Three axes (row, column, k): the weights' tile is loaded once and broadcast over the rows.
        x_inside = (rows < m_size)[:, None, None]
        x_pointers = x + rows[:, None, None] * x_stride_m + ks[None, None, :]
        w_pointers = w + w_columns[None, :, None] * W_STRIDE_N + ks[None, None, :] * W_STRIDE_K
        acc0 = tl.zeros((BLOCK_M, BLOCK_N, BLOCK_K), tl.float32)
        acc1 = acc0
        for k in tl.range(0, K, BLOCK_K, num_stages=STAGES, loop_unroll_factor=UNROLL):
            if K % BLOCK_K == 0:
                xs = tl.load(x_pointers + k, mask=x_inside, other=0.0).to(tl.float32)
                ws = tl.load(w_pointers + k * W_STRIDE_K, eviction_policy=EVICTION)
                acc0 += xs * ws.to(tl.float32)
                if HALVES == 2:
                    us = tl.load(w_pointers + (k * W_STRIDE_K + N * W_STRIDE_N), eviction_policy=EVICTION)
                    acc1 += xs * us.to(tl.float32)
            else:
                inside = (k + ks)[None, None, :] < K
                xs = tl.load(x_pointers + k, mask=inside & x_inside, other=0.0).to(tl.float32)
                ws = tl.load(w_pointers + k * W_STRIDE_K, mask=inside, other=0.0, eviction_policy=EVICTION)
                acc0 += xs * ws.to(tl.float32)
                if HALVES == 2:
                    us = tl.load(
                        w_pointers + (k * W_STRIDE_K + N * W_STRIDE_N), mask=inside, other=0.0, eviction_policy=EVICTION
                    )
                    acc1 += xs * us.to(tl.float32)
        sum0 = tl.sum(acc0, axis=2)
        sum1 = sum0
        if HALVES == 2:
            sum1 = tl.sum(acc1, axis=2)
        EPILOGUE(sum0, sum1, rows[:, None], columns[None, :], m_size, operands)
