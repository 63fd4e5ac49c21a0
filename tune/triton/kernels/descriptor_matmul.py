"""Tiles of a matrix product fetched through tensor descriptors.

Hopper's copy engine moves them, so no thread computes an address or a mask, and what lies outside reads as 0. A fixed
number of programs walk all tiles, or every tile has its own.

Descriptors are made on the device, in the kernel's global scratch memory, so the pointers may change with every call.
"""

import triton
import triton.language as tl

from tune_model.tune.triton.kernels.dependency import prefetch_weights, wait_for_predecessor
from tune_model.tune.triton.kernels.matmul import add_if_last


@triton.jit
def accumulate(
    x_tiles,
    w_tiles,
    row,
    column,
    first,
    last,
    N: tl.constexpr,
    HALVES: tl.constexpr,
    JOINED: tl.constexpr,
    TRANSPOSED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SWAP: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Multiply one tile over k from `first` to `last`; what lies outside the operands reads as 0."""
    if JOINED:
        both = tl.zeros((BLOCK_M, 2 * BLOCK_N), tl.float32)
        for k in tl.range(first, last, BLOCK_K):
            xs = x_tiles.load([row, k])
            ws = tl.reshape(w_tiles.load([0, column, k]), (2 * BLOCK_N, BLOCK_K))
            both = tl.dot(xs, ws.T, both, input_precision=PRECISION)
        acc0, acc1 = halve(both)
    else:
        if SWAP:
            acc0 = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
        else:
            acc0 = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        acc1 = acc0
        for k in tl.range(first, last, BLOCK_K):
            xs = x_tiles.load([row, k])
            if TRANSPOSED:
                ws = w_tiles.load([k, column])
            else:
                ws = w_tiles.load([column, k]).T
            if SWAP:
                acc0 = tl.dot(ws.T, xs.T, acc0, input_precision=PRECISION)
            else:
                acc0 = tl.dot(xs, ws, acc0, input_precision=PRECISION)
            if HALVES == 2:
                if TRANSPOSED:
                    us = w_tiles.load([k, N + column])
                else:
                    us = w_tiles.load([N + column, k]).T
                if SWAP:
                    acc1 = tl.dot(us.T, xs.T, acc1, input_precision=PRECISION)
                else:
                    acc1 = tl.dot(xs, us, acc1, input_precision=PRECISION)
        if HALVES == 1:
            acc1 = acc0
    return acc0, acc1


@triton.jit
def halve(tile):
    """Split a tile into the left and the right half of its columns."""
    rows: tl.constexpr = tile.shape[0]
    columns: tl.constexpr = tile.shape[1]
    return tl.split(tl.permute(tl.reshape(tile, (rows, 2, columns // 2)), (0, 2, 1)))


@triton.jit
def finish(
    acc0,
    acc1,
    place,
    row,
    column,
    m_size,
    operands,
    result_tiles,
    partials,
    counter,
    N: tl.constexpr,
    HALVES: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SPLIT_K: tl.constexpr,
    LAST_ADDS: tl.constexpr,
    SWAP: tl.constexpr,
    STORE: tl.constexpr,
    EPILOGUE: tl.constexpr,
):
    """Run the epilogue over a tile that begins at a row and a column; with STORE it returns what is to be written."""
    rows = row + tl.arange(0, BLOCK_M)
    columns = column + tl.arange(0, BLOCK_N)
    if SWAP:
        rows = rows[None, :]
        columns = columns[:, None]
    else:
        rows = rows[:, None]
        columns = columns[None, :]
    if STORE:
        result_tiles.store([row, column], EPILOGUE(acc0, acc1, place, rows, columns, m_size, operands))
    elif LAST_ADDS:
        add_if_last(
            acc0, acc1, 0, place, rows, columns, m_size, operands, partials, counter, N, HALVES, SPLIT_K, EPILOGUE
        )
    else:
        EPILOGUE(acc0, acc1, place, rows, columns, m_size, operands)


@triton.jit
def place_of(tile, grid_m, GRID_N: tl.constexpr, GROUP_M: tl.constexpr):
    """Return the tile's row and column in the grid: GROUP_M rows of tiles share the columns they read."""
    width: tl.constexpr = GROUP_M * GRID_N
    group = tile // width
    group_rows = tl.minimum(grid_m - group * GROUP_M, GROUP_M)
    return group * GROUP_M + (tile % width) % group_rows, (tile % width) // group_rows


@triton.jit
def one_tile(
    number,
    x_tiles,
    w_tiles,
    result_tiles,
    m_size,
    operands,
    partials,
    counters,
    N: tl.constexpr,
    K: tl.constexpr,
    HALVES: tl.constexpr,
    JOINED: tl.constexpr,
    TRANSPOSED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
    SPLIT_K: tl.constexpr,
    LAST_ADDS: tl.constexpr,
    SWAP: tl.constexpr,
    SUBTILES: tl.constexpr,
    STORE: tl.constexpr,
    PRECISION: tl.constexpr,
    EPILOGUE: tl.constexpr,
):
    """Compute and finish the tile of a number; with SPLIT_K one of its ranges of k, all tiles' first ranges first."""
    grid_m = tl.cdiv(m_size, BLOCK_M)
    grid_n: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    split = 0
    tile = number
    first = 0
    last = K
    if SPLIT_K > 1:
        steps: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
        span: tl.constexpr = (steps + SPLIT_K - 1) // SPLIT_K * BLOCK_K
        whole = grid_m * grid_n
        split = number // whole
        tile = number % whole
        first = split * span
        last = tl.minimum(first + span, K)
    counter = counters
    if LAST_ADDS:
        counter += tile
    pid_m, pid_n = place_of(tile, grid_m, grid_n, GROUP_M)
    row = pid_m * BLOCK_M
    column = pid_n * BLOCK_N
    acc0, acc1 = accumulate(
        x_tiles, w_tiles, row, column, first, last,
        N, HALVES, JOINED, TRANSPOSED, BLOCK_M, BLOCK_N, BLOCK_K, SWAP, PRECISION,
    )  # fmt: skip
    if SUBTILES == 1:
        finish(
            acc0, acc1, split, row, column, m_size, operands, result_tiles, partials, counter,
            N, HALVES, BLOCK_M, BLOCK_N, SPLIT_K, LAST_ADDS, SWAP, STORE, EPILOGUE,
        )  # fmt: skip
    else:  # fewer registers, less memory
        half: tl.constexpr = BLOCK_N // 2
        left0, right0 = halve(acc0)
        left1, right1 = halve(acc1)
        finish(
            left0, left1, split, row, column, m_size, operands, result_tiles, partials, counter,
            N, HALVES, BLOCK_M, half, SPLIT_K, LAST_ADDS, SWAP, STORE, EPILOGUE,
        )  # fmt: skip
        finish(
            right0, right1, split, row, column + half, m_size, operands, result_tiles, partials, counter,
            N, HALVES, BLOCK_M, half, SPLIT_K, LAST_ADDS, SWAP, STORE, EPILOGUE,
        )  # fmt: skip


@triton.jit
def descriptor_matmul(
    x,
    w,
    result,
    operands,
    partials,
    counters,
    m_size,
    x_stride,
    w_stride,
    result_stride,
    N: tl.constexpr,
    K: tl.constexpr,
    HALVES: tl.constexpr,
    JOINED: tl.constexpr,
    TRANSPOSED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
    SPLIT_K: tl.constexpr,
    LAST_ADDS: tl.constexpr,
    PROGRAMS: tl.constexpr,
    SWAP: tl.constexpr,
    SUBTILES: tl.constexpr,
    STORE: tl.constexpr,
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
    AHEAD: tl.constexpr,
    EPILOGUE: tl.constexpr,
):
    """Compute x [m_size, K] times w [N * HALVES, K] transposed; TRANSPOSED says that w is stored [K, N * HALVES].

    Args:
        x: Rows of K contiguous elements, `x_stride` apart.
        w: Likewise, `w_stride` apart.
        result: Where STORE writes, rows of N contiguous elements; unused without it.
        operands: The epilogue's.
        partials: For LAST_ADDS, [SPLIT_K, m_size, N * HALVES].
        counters: For LAST_ADDS, a zero for each tile.
        m_size: Rows.
        x_stride: A multiple of 16 bytes.
        w_stride: A multiple of 16 bytes.
        result_stride: A multiple of 16 bytes.
        N: Columns of the result; with two halves each tile computes the same columns of both.
        K: Length of the dot products.
        HALVES: 1 or 2.
        JOINED: With two halves and w not TRANSPOSED: fetch and multiply both as one tile, twice as wide.
        TRANSPOSED: How w is stored.
        BLOCK_M: Rows of a tile.
        BLOCK_N: Columns of a tile.
        BLOCK_K: Elements of k that are fetched at a time.
        GROUP_M: Rows of tiles that share the columns they read.
        SPLIT_K: Ranges of K; each is a tile of its own, and the epilogue gets its number.
        LAST_ADDS: The last of a tile's ranges to be done adds them all and finishes the tile.
        PROGRAMS: How many programs walk all tiles; 0 gives each tile its own.
        SWAP: Make the weights the left operand, so that few rows still fill the tensor cores' wide side.
        SUBTILES: Parts of a tile's columns that the epilogue takes one after another.
        STORE: Write the result through a descriptor too.
        PRECISION: Of `tl.dot`.
        PDL: Launched before its predecessor is done.
        AHEAD: The weights' first so many elements of k are asked for before it is waited for.
        EPILOGUE: Stores a tile, or returns it where STORE does.
    """
    grid_m = tl.cdiv(m_size, BLOCK_M)
    grid_n: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    whole = grid_m * grid_n
    if AHEAD > 0:
        _, pid_n = place_of(tl.program_id(0) % whole, grid_m, grid_n, GROUP_M)
        stride_n: tl.constexpr = 1 if TRANSPOSED else w_stride
        stride_k: tl.constexpr = w_stride if TRANSPOSED else 1
        steps: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
        first = (tl.program_id(0) // whole) * ((steps + SPLIT_K - 1) // SPLIT_K * BLOCK_K)
        prefetch_weights(w, pid_n * BLOCK_N, first, stride_n, stride_k, N, HALVES, BLOCK_N, AHEAD)
    wait_for_predecessor(PDL)
    x_tiles = tl.make_tensor_descriptor(x, [m_size, K], [x_stride, 1], [BLOCK_M, BLOCK_K])
    if JOINED:
        w_tiles = tl.make_tensor_descriptor(w, [2, N, K], [N * w_stride, w_stride, 1], [2, BLOCK_N, BLOCK_K])
    elif TRANSPOSED:
        w_tiles = tl.make_tensor_descriptor(w, [K, N * HALVES], [w_stride, 1], [BLOCK_K, BLOCK_N])
    else:
        w_tiles = tl.make_tensor_descriptor(w, [N * HALVES, K], [w_stride, 1], [BLOCK_N, BLOCK_K])
    if STORE:
        result_tiles = tl.make_tensor_descriptor(
            result, [m_size, N], [result_stride, 1], [BLOCK_M, BLOCK_N // SUBTILES]
        )
    else:
        result_tiles = x_tiles

    if PROGRAMS == 0:
        one_tile(
            tl.program_id(0), x_tiles, w_tiles, result_tiles, m_size, operands, partials, counters,
            N, K, HALVES, JOINED, TRANSPOSED, BLOCK_M, BLOCK_N, BLOCK_K, GROUP_M,
            SPLIT_K, LAST_ADDS, SWAP, SUBTILES, STORE, PRECISION, EPILOGUE,
        )  # fmt: skip
    else:
        # Flattened, so that the next tile's fetches begin during an epilogue.
        for tile in tl.range(tl.program_id(0), whole * SPLIT_K, PROGRAMS, flatten=True):
            one_tile(
                tile, x_tiles, w_tiles, result_tiles, m_size, operands, partials, counters,
                N, K, HALVES, JOINED, TRANSPOSED, BLOCK_M, BLOCK_N, BLOCK_K, GROUP_M,
                SPLIT_K, LAST_ADDS, SWAP, SUBTILES, STORE, PRECISION, EPILOGUE,
            )  # fmt: skip
