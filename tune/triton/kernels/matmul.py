"""Tiles of a matrix product on tensor cores, for any number of rows, and the two ways to finish a split K."""

import triton
import triton.language as tl

from tune_model.tune.triton.kernels.dependency import prefetch_weights, wait_for_predecessor


@triton.jit
def matmul(
    x,
    w,
    operands,
    partials,
    counters,
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
    GROUP_M: tl.constexpr,
    SPLIT_K: tl.constexpr,
    LAST_ADDS: tl.constexpr,
    SWAP: tl.constexpr,
    WRAP_ROWS: tl.constexpr,
    EVICTION: tl.constexpr,
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
    AHEAD: tl.constexpr,
    EPILOGUE: tl.constexpr,
):
    """Compute a tile of x [batch, m_size, K] times w [batch, N * HALVES, K] transposed over one of SPLIT_K ranges of K.

    Every operand may lie in memory in any order; WIDE says that offsets inside one need 64 bits. With two halves each
    program computes the same columns of both. SWAP makes the weights the left operand, so that a
    tile with few rows still fills the tensor cores' wide side. WRAP_ROWS reads rows past the end again from the start
    (no masks in the loop) where masking would save no traffic. The weights' first AHEAD elements of k are asked for
    before the predecessor is waited for. With LAST_ADDS the program that is the last of a tile's SPLIT_K to arrive adds
    their parts in a fixed order and finishes the tile; else EPILOGUE stores part `batch * SPLIT_K + split` and a second
    kernel adds them.
    """
    pid = tl.program_id(0)
    batch = tl.program_id(2)
    x += batch.to(tl.int64) * x_stride_b
    w += batch.to(tl.int64) * w_stride_b
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
    ks = tl.arange(0, BLOCK_K)
    if WIDE:
        w_columns = w_columns.to(tl.int64)
        ks = ks.to(tl.int64)
    if SWAP:
        x_pointers = x + x_rows.to(tl.int64)[None, :] * x_stride_m + ks[:, None] * x_stride_k
        w_pointers = w + w_columns[:, None] * w_stride_n + ks[None, :] * w_stride_k
        x_inside = (rows < m_size)[None, :]
        acc0 = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    else:
        x_pointers = x + x_rows.to(tl.int64)[:, None] * x_stride_m + ks[None, :] * x_stride_k
        w_pointers = w + w_columns[None, :] * w_stride_n + ks[:, None] * w_stride_k
        x_inside = (rows < m_size)[:, None]
        acc0 = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    acc1 = acc0

    steps: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    span: tl.constexpr = ((steps + SPLIT_K - 1) // SPLIT_K) * BLOCK_K
    far = N * w_stride_n
    first = 0
    last = K
    if SPLIT_K > 1:
        first = tl.program_id(1) * span
        last = tl.minimum(first + span, K)
    if AHEAD > 0:
        prefetch_weights(w, pid_n * BLOCK_N, first, w_stride_n, w_stride_k, N, HALVES, BLOCK_N, AHEAD)
    wait_for_predecessor(PDL)
    for k in tl.range(first, last, BLOCK_K):
        x_step = k
        w_step = k
        if WIDE:
            x_step = tl.cast(k, tl.int64)
            w_step = tl.cast(k, tl.int64)
        x_step *= x_stride_k
        w_step *= w_stride_k
        if K % BLOCK_K == 0:
            if WRAP_ROWS:
                xs = tl.load(x_pointers + x_step)
            else:
                xs = tl.load(x_pointers + x_step, mask=x_inside, other=0.0)
            ws = tl.load(w_pointers + w_step, eviction_policy=EVICTION)
        else:
            k_x = (k + ks)[:, None] < K if SWAP else (k + ks)[None, :] < K
            k_w = (k + ks)[None, :] < K if SWAP else (k + ks)[:, None] < K
            if WRAP_ROWS:
                xs = tl.load(x_pointers + x_step, mask=k_x, other=0.0)
            else:
                xs = tl.load(x_pointers + x_step, mask=k_x & x_inside, other=0.0)
            ws = tl.load(w_pointers + w_step, mask=k_w, other=0.0, eviction_policy=EVICTION)
        if SWAP:
            acc0 = tl.dot(ws, xs, acc0, input_precision=PRECISION)
        else:
            acc0 = tl.dot(xs, ws, acc0, input_precision=PRECISION)
        if HALVES == 2:
            if K % BLOCK_K == 0:
                us = tl.load(w_pointers + (w_step + far), eviction_policy=EVICTION)
            else:
                us = tl.load(w_pointers + (w_step + far), mask=k_w, other=0.0, eviction_policy=EVICTION)
            if SWAP:
                acc1 = tl.dot(us, xs, acc1, input_precision=PRECISION)
            else:
                acc1 = tl.dot(xs, us, acc1, input_precision=PRECISION)
    if HALVES == 1:
        acc1 = acc0

    place = batch
    if SPLIT_K > 1:
        place = batch * SPLIT_K + tl.program_id(1)
    if SWAP:
        rows = rows[None, :]
        columns = columns[:, None]
    else:
        rows = rows[:, None]
        columns = columns[None, :]
    if LAST_ADDS:
        add_if_last(
            acc0,
            acc1,
            batch,
            tl.program_id(1),
            rows,
            columns,
            m_size,
            operands,
            partials,
            counters + batch * tl.num_programs(0) + pid,
            N,
            HALVES,
            SPLIT_K,
            EPILOGUE,
        )
    else:
        EPILOGUE(acc0, acc1, place, rows, columns, m_size, operands)


@triton.jit
def add_if_last(
    acc0,
    acc1,
    batch,
    split,
    rows,
    columns,
    m_size,
    operands,
    partials,
    counter,
    N: tl.constexpr,
    HALVES: tl.constexpr,
    SPLIT_K: tl.constexpr,
    EPILOGUE: tl.constexpr,
):
    """Store this program's part of a tile; the last of the tile's programs adds all parts in their order and finishes.

    The counter is zero before and after. A barrier orders all threads' stores before the one thread's release; its
    acquire, and the barrier that hands its value out, order the loads behind every other program's stores.
    """
    mask = (rows < m_size) & (columns < N)
    step = m_size.to(tl.int64) * (N * HALVES)
    pointers = partials + batch * (step * SPLIT_K) + rows.to(tl.int64) * (N * HALVES) + columns
    mine = pointers + split * step
    tl.store(mine, acc0, mask=mask)
    if HALVES == 2:
        tl.store(mine + N, acc1, mask=mask)
    tl.debug_barrier()
    arrived = tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu")
    if arrived == SPLIT_K - 1:
        total0 = tl.zeros_like(acc0)
        total1 = tl.zeros_like(acc1)
        for part in tl.static_range(SPLIT_K):
            # Past the first-level cache, which knows nothing of other programs' stores.
            total0 += tl.load(pointers + part * step, mask=mask, other=0.0, cache_modifier=".cg")
            if HALVES == 2:
                total1 += tl.load(pointers + part * step + N, mask=mask, other=0.0, cache_modifier=".cg")
        if HALVES == 1:
            total1 = total0
        EPILOGUE(total0, total1, batch, rows, columns, m_size, operands)
        tl.store(counter, 0)


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
    """Add partial products [batch, SPLIT_K, m_size, N * HALVES] in a fixed order and finish the tile."""
    wait_for_predecessor(PDL)
    batch = tl.program_id(2)
    rows = (tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M))[:, None]
    columns = (tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N))[None, :]
    mask = (rows < m_size) & (columns < N)
    step = m_size.to(tl.int64) * (N * HALVES)
    pointers = partials + batch * (step * SPLIT_K) + rows.to(tl.int64) * (N * HALVES) + columns
    acc0 = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    acc1 = acc0
    for split in tl.static_range(SPLIT_K):
        acc0 += tl.load(pointers + split * step, mask=mask, other=0.0)
        if HALVES == 2:
            acc1 += tl.load(pointers + split * step + N, mask=mask, other=0.0)
    if HALVES == 1:
        acc1 = acc0
    EPILOGUE(acc0, acc1, batch, rows, columns, m_size, operands)
