"""Matrix times a few vectors: every program owns `BLOCK_N` output columns and streams their weights once.

No tensor cores: with up to four rows of activations the weights' bytes are everything. Partial products accumulate per
element in float32 and are summed across the block at the end.
"""

import triton
import triton.language as tl

from tune_model.tune.triton.kernels.dependency import prefetch_weights, wait_for_predecessor


@triton.jit
def gemv(
    x,
    w,
    operands,
    m_size,
    x_stride_b,
    x_stride_m,
    x_stride_k,
    w_stride_b,
    w_stride_n,
    w_stride_k,
    N: tl.constexpr,
    K: tl.constexpr,
    HALVES: tl.constexpr,
    WIDE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
    UNROLL: tl.constexpr,
    EVICTION: tl.constexpr,
    PDL: tl.constexpr,
    AHEAD: tl.constexpr,
    EPILOGUE: tl.constexpr,
):
    """Compute x [batch, m_size <= BLOCK_M, K] times w [batch, N * HALVES, K] transposed; with two halves, both columns.

    Every operand may lie in memory in any order; WIDE says that offsets inside one need 64 bits. The
    weights' first AHEAD elements of k are asked for before the predecessor is waited for.
    """
    batch = tl.program_id(1)
    x += batch.to(tl.int64) * x_stride_b
    w += batch.to(tl.int64) * w_stride_b
    columns = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    w_columns = columns
    ks = tl.arange(0, BLOCK_K)
    rows = tl.arange(0, BLOCK_M)
    if N % BLOCK_N != 0:
        w_columns = columns % N
    if WIDE:
        w_columns = w_columns.to(tl.int64)
        ks = ks.to(tl.int64)
    far = N * w_stride_n
    if AHEAD > 0:
        prefetch_weights(w, tl.program_id(0) * BLOCK_N, 0, w_stride_n, w_stride_k, N, HALVES, BLOCK_N, AHEAD)
    wait_for_predecessor(PDL)
    if BLOCK_M == 1:
        x_pointers = x + ks[None, :] * x_stride_k
        w_pointers = w + w_columns[:, None] * w_stride_n + ks[None, :] * w_stride_k
        acc0 = tl.zeros((BLOCK_N, BLOCK_K), tl.float32)
        acc1 = acc0
        for k in tl.range(0, K, BLOCK_K, num_stages=STAGES, loop_unroll_factor=UNROLL):
            x_step = k
            w_step = k
            if WIDE:
                x_step = tl.cast(k, tl.int64)
                w_step = tl.cast(k, tl.int64)
            x_step *= x_stride_k
            w_step *= w_stride_k
            if K % BLOCK_K == 0:
                xs = tl.load(x_pointers + x_step).to(tl.float32)
                ws = tl.load(w_pointers + w_step, eviction_policy=EVICTION)
                acc0 += xs * ws.to(tl.float32)
                if HALVES == 2:
                    us = tl.load(w_pointers + (w_step + far), eviction_policy=EVICTION)
                    acc1 += xs * us.to(tl.float32)
            else:
                inside = (k + ks)[None, :] < K
                xs = tl.load(x_pointers + x_step, mask=inside, other=0.0).to(tl.float32)
                ws = tl.load(w_pointers + w_step, mask=inside, other=0.0, eviction_policy=EVICTION)
                acc0 += xs * ws.to(tl.float32)
                if HALVES == 2:
                    us = tl.load(w_pointers + (w_step + far), mask=inside, other=0.0, eviction_policy=EVICTION)
                    acc1 += xs * us.to(tl.float32)
        sum0 = tl.sum(acc0, axis=1)[None, :]
        sum1 = sum0
        if HALVES == 2:
            sum1 = tl.sum(acc1, axis=1)[None, :]
        EPILOGUE(sum0, sum1, batch, rows[:, None], columns[None, :], m_size, operands)
    else:
        # Three axes (row, column, k): the weights' tile is loaded once and broadcast over the rows.
        x_inside = (rows < m_size)[:, None, None]
        x_pointers = x + rows[:, None, None] * x_stride_m + ks[None, None, :] * x_stride_k
        w_pointers = w + w_columns[None, :, None] * w_stride_n + ks[None, None, :] * w_stride_k
        acc0 = tl.zeros((BLOCK_M, BLOCK_N, BLOCK_K), tl.float32)
        acc1 = acc0
        for k in tl.range(0, K, BLOCK_K, num_stages=STAGES, loop_unroll_factor=UNROLL):
            x_step = k
            w_step = k
            if WIDE:
                x_step = tl.cast(k, tl.int64)
                w_step = tl.cast(k, tl.int64)
            x_step *= x_stride_k
            w_step *= w_stride_k
            if K % BLOCK_K == 0:
                xs = tl.load(x_pointers + x_step, mask=x_inside, other=0.0).to(tl.float32)
                ws = tl.load(w_pointers + w_step, eviction_policy=EVICTION)
                acc0 += xs * ws.to(tl.float32)
                if HALVES == 2:
                    us = tl.load(w_pointers + (w_step + far), eviction_policy=EVICTION)
                    acc1 += xs * us.to(tl.float32)
            else:
                inside = (k + ks)[None, None, :] < K
                xs = tl.load(x_pointers + x_step, mask=inside & x_inside, other=0.0).to(tl.float32)
                ws = tl.load(w_pointers + w_step, mask=inside, other=0.0, eviction_policy=EVICTION)
                acc0 += xs * ws.to(tl.float32)
                if HALVES == 2:
                    us = tl.load(w_pointers + (w_step + far), mask=inside, other=0.0, eviction_policy=EVICTION)
                    acc1 += xs * us.to(tl.float32)
        sum0 = tl.sum(acc0, axis=2)
        sum1 = sum0
        if HALVES == 2:
            sum1 = tl.sum(acc1, axis=2)
        EPILOGUE(sum0, sum1, batch, rows[:, None], columns[None, :], m_size, operands)
