"""Tiles of a matrix product on tensor cores, for any number of rows, and the second pass of split-K."""

import triton
import triton.language as tl

from tune_model.tune.triton.kernels.dependency import wait_for_predecessor


@triton.jit
def matmul(
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
    GROUP_M: tl.constexpr,
    SPLIT_K: tl.constexpr,
    SWAP: tl.constexpr,
    WRAP_ROWS: tl.constexpr,
    EVICTION: tl.constexpr,
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
    EPILOGUE: tl.constexpr,
):
    """Compute a tile of x [m_size, K] times w [N * HALVES, K] transposed over one of SPLIT_K ranges of K.

    With two halves each program computes the same columns of both. SWAP makes the weights the left operand, so that a
    tile with few rows still fills the tensor cores' wide side. WRAP_ROWS reads rows past the end again from the start
    (no masks in the loop) where masking would save no traffic.
    """
    wait_for_predecessor(PDL)
    pid = tl.program_id(0)
    grid_m = tl.cdiv(m_size, BLOCK_M)
    grid_n: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    width = GROUP_M * grid_n
    group = pid // width
    group_rows = tl.minimum(grid_m - group * GROUP_M, GROUP_M)
    pid_m = group * GROUP_M + (pid % width) % group_rows
    pid_n = (pid % width) // group_rows

    rows = pid_m * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = pid_n * BLOCK_N + tl.arange(0, BLOCK_N)
    x_rows = rows
    if WRAP_ROWS:
        x_rows = rows % m_size
    w_columns = columns
    if N % BLOCK_N != 0:
        w_columns = columns % N
    if N * HALVES * K >= 2**31:
        w_columns = w_columns.to(tl.int64)
    ks = tl.arange(0, BLOCK_K)
    if SWAP:
        x_pointers = x + x_rows.to(tl.int64)[None, :] * x_stride_m + ks[:, None]
        w_pointers = w + w_columns[:, None] * W_STRIDE_N + ks[None, :] * W_STRIDE_K
        x_inside = (rows < m_size)[None, :]
        acc0 = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    else:
        x_pointers = x + x_rows.to(tl.int64)[:, None] * x_stride_m + ks[None, :]
        w_pointers = w + w_columns[None, :] * W_STRIDE_N + ks[:, None] * W_STRIDE_K
        x_inside = (rows < m_size)[:, None]
        acc0 = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    acc1 = acc0

    steps: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    span: tl.constexpr = ((steps + SPLIT_K - 1) // SPLIT_K) * BLOCK_K
    first = 0
    last = K
    if SPLIT_K > 1:
        first = tl.program_id(1) * span
        last = tl.minimum(first + span, K)
    for k in tl.range(first, last, BLOCK_K):
        if K % BLOCK_K == 0:
            if WRAP_ROWS:
                xs = tl.load(x_pointers + k)
            else:
                xs = tl.load(x_pointers + k, mask=x_inside, other=0.0)
            ws = tl.load(w_pointers + k * W_STRIDE_K, eviction_policy=EVICTION)
        else:
            k_x = (k + ks)[:, None] < K if SWAP else (k + ks)[None, :] < K
            k_w = (k + ks)[None, :] < K if SWAP else (k + ks)[:, None] < K
            if WRAP_ROWS:
                xs = tl.load(x_pointers + k, mask=k_x, other=0.0)
            else:
                xs = tl.load(x_pointers + k, mask=k_x & x_inside, other=0.0)
            ws = tl.load(w_pointers + k * W_STRIDE_K, mask=k_w, other=0.0, eviction_policy=EVICTION)
        if SWAP:
            acc0 = tl.dot(ws, xs, acc0, input_precision=PRECISION)
        else:
            acc0 = tl.dot(xs, ws, acc0, input_precision=PRECISION)
        if HALVES == 2:
            if K % BLOCK_K == 0:
                us = tl.load(w_pointers + (k * W_STRIDE_K + N * W_STRIDE_N), eviction_policy=EVICTION)
            else:
                us = tl.load(
                    w_pointers + (k * W_STRIDE_K + N * W_STRIDE_N), mask=k_w, other=0.0, eviction_policy=EVICTION
                )
            if SWAP:
                acc1 = tl.dot(us, xs, acc1, input_precision=PRECISION)
            else:
                acc1 = tl.dot(xs, us, acc1, input_precision=PRECISION)
    if HALVES == 1:
        acc1 = acc0

    if SWAP:
        EPILOGUE(acc0, acc1, rows[None, :], columns[:, None], m_size, operands)
    else:
        EPILOGUE(acc0, acc1, rows[:, None], columns[None, :], m_size, operands)


@triton.jit
def sum_partials(
    partials,
    operands,
    m_size,
    N: tl.constexpr,
    HALVES: tl.constexpr,
    SPLIT_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PDL: tl.constexpr,
    EPILOGUE: tl.constexpr,
):
    """Add the SPLIT_K partial products [SPLIT_K, m_size, N * HALVES] in a fixed order and finish the tile."""
    wait_for_predecessor(PDL)
    rows = (tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M))[:, None]
    columns = (tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N))[None, :]
    mask = (rows < m_size) & (columns < N)
    step = m_size.to(tl.int64) * (N * HALVES)
    pointers = partials + rows.to(tl.int64) * (N * HALVES) + columns
    acc0 = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    acc1 = acc0
    for split in tl.static_range(SPLIT_K):
        acc0 += tl.load(pointers + split * step, mask=mask, other=0.0)
        if HALVES == 2:
            acc1 += tl.load(pointers + split * step + N, mask=mask, other=0.0)
    if HALVES == 1:
        acc1 = acc0
    EPILOGUE(acc0, acc1, rows, columns, m_size, operands)
