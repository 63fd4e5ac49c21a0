"""Attention of many queries: tiles of queries run over the keys that they see, with a running softmax.

Programs are (tile of queries, head, row); the tiles that see most keys come first. Which keys a tile sees follows from
indices (causal), from positions read on the device (a cache), or from a mask; blocks outside are never read, so cost
follows what is visible. Blocks that every query of a tile sees whole are taken without any masking.
"""

import triton
import triton.language as tl

from tune_model.tune.triton.kernels.decode_attention import LOG2_E, cap_scores
from tune_model.tune.triton.kernels.dependency import wait_for_predecessor


@triton.jit
def attend(
    q,
    k,
    v,
    mask,
    positions,
    sinks,
    out,
    queries,
    keys,
    q_stride_b,
    q_stride_h,
    q_stride_m,
    k_stride_b,
    k_stride_h,
    k_stride_n,
    v_stride_b,
    v_stride_h,
    v_stride_n,
    mask_stride_b,
    mask_stride_h,
    mask_stride_m,
    mask_stride_n,
    positions_stride_b,
    positions_stride_m,
    out_stride_b,
    out_stride_h,
    out_stride_m,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    SCALE: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    LAST: tl.constexpr,
    MASK: tl.constexpr,
    SINKS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_V: tl.constexpr,
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):
    """Attend for one tile of queries.

    LAST says what the last key is that a query sees: `index` (its own number), `positions`, or `all`. MASK is `none`,
    `bool` or `bias` (one element per query and key), or `row` (bools, the same for all queries of a row and head).
    """
    wait_for_predecessor(PDL)
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    head = tl.program_id(1)
    row = tl.program_id(2).to(tl.int64)
    m = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    is_query = m < queries
    if LAST == "index":
        last = m
    elif LAST == "positions":
        last = tl.load(positions + row * positions_stride_b + m * positions_stride_m, mask=is_query, other=-1).to(
            tl.int32
        )
    else:
        last = tl.where(is_query, keys - 1, -1)
    last = tl.minimum(last, keys - 1)
    high = tl.max(tl.where(is_query, last, -1), axis=0) + 1
    whole = tl.min(tl.where(is_query, last, 2147483647), axis=0) + 1
    low = high * 0
    if WINDOW > 0:
        low = tl.maximum(whole - WINDOW, 0) // BLOCK_N * BLOCK_N
    mask_base = mask + row * mask_stride_b + head * mask_stride_h
    if MASK == "row":
        low, high = visible_keys(mask_base, mask_stride_n, low, high, BLOCK_N)

    d = tl.arange(0, BLOCK_D)
    e = tl.arange(0, BLOCK_V)
    q_base = q + row * q_stride_b + head * q_stride_h
    qs = tl.load(
        q_base + m.to(tl.int64)[:, None] * q_stride_m + d[None, :],
        mask=is_query[:, None] & (d < HEAD_DIM)[None, :],
        other=0.0,
    )
    k_base = k + row * k_stride_b + (head // GROUP).to(tl.int64) * k_stride_h
    v_base = v + row * v_stride_b + (head // GROUP).to(tl.int64) * v_stride_h
    best = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    acc = tl.zeros((BLOCK_M, BLOCK_V), tl.float32)
    # Windows and masks cut into every block; otherwise only the blocks from `whole` on need a look.
    whole = whole // BLOCK_N * BLOCK_N if WINDOW == 0 and MASK == "none" else low
    whole = tl.minimum(whole, high)
    for n in tl.range(low, whole, BLOCK_N):
        best, total, acc = take_block(
            best, total, acc, qs, k_base, v_base, mask_base, n, m, last, keys, k_stride_n, v_stride_n, mask_stride_m,
            mask_stride_n, d, e, HEAD_DIM, VALUE_DIM, SCALE, WINDOW, SOFTCAP, "none", False, BLOCK_N, PRECISION,
        )  # fmt: skip
    for n in tl.range(whole, high, BLOCK_N):
        best, total, acc = take_block(
            best, total, acc, qs, k_base, v_base, mask_base, n, m, last, keys, k_stride_n, v_stride_n, mask_stride_m,
            mask_stride_n, d, e, HEAD_DIM, VALUE_DIM, SCALE, WINDOW, SOFTCAP, MASK, True, BLOCK_N, PRECISION,
        )  # fmt: skip
    if SINKS:
        sink = tl.load(sinks + head).to(tl.float32) * LOG2_E
        better = tl.maximum(best, sink)
        decay = tl.exp2(best - better)
        total = total * decay + tl.exp2(sink - better)
        acc = acc * decay[:, None]
    # A query that sees nothing gets zeros, as ATen's softmax over nothing gives.
    result = acc / tl.where(total == 0.0, 1.0, total)[:, None]
    tl.store(
        out + row * out_stride_b + head * out_stride_h + m.to(tl.int64)[:, None] * out_stride_m + e[None, :],
        result.to(out.dtype.element_ty),
        mask=is_query[:, None] & (e < VALUE_DIM)[None, :],
    )


@triton.jit
def visible_keys(mask, mask_stride_n, low, high, BLOCK_N: tl.constexpr):
    """Return the range of blocks outside of which a row's mask lets nothing through."""
    offsets = tl.arange(0, 1024)
    first = high
    last = low - 1
    for n in tl.range(low, high, 1024):
        keys = n + offsets
        seen = tl.load(mask + keys * mask_stride_n, mask=keys < high, other=0) != 0
        first = tl.minimum(first, tl.min(tl.where(seen, keys, high), axis=0))
        last = tl.maximum(last, tl.max(tl.where(seen, keys, low - 1), axis=0))
    return tl.minimum(first, last + 1) // BLOCK_N * BLOCK_N, last + 1


@triton.jit
def take_block(
    best,
    total,
    acc,
    qs,
    k_base,
    v_base,
    mask_base,
    n,
    m,
    last,
    keys,
    k_stride_n,
    v_stride_n,
    mask_stride_m,
    mask_stride_n,
    d,
    e,
    HEAD_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    SCALE: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    MASK: tl.constexpr,
    CHECKED: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Take one block of keys into the running softmax; unless CHECKED, every query sees all of it."""
    numbers = n + tl.arange(0, BLOCK_N)
    there = numbers < keys
    k_pointers = k_base + numbers.to(tl.int64)[None, :] * k_stride_n + d[:, None]
    v_pointers = v_base + numbers.to(tl.int64)[:, None] * v_stride_n + e[None, :]
    if CHECKED:
        ks = tl.load(k_pointers, mask=there[None, :] & (d < HEAD_DIM)[:, None], other=0.0)
        vs = tl.load(v_pointers, mask=there[:, None] & (e < VALUE_DIM)[None, :], other=0.0)
    else:
        ks = tl.load(k_pointers, mask=(d < HEAD_DIM)[:, None], other=0.0)
        vs = tl.load(v_pointers, mask=(e < VALUE_DIM)[None, :], other=0.0)
    scores = cap_scores(tl.dot(qs, ks, input_precision=PRECISION), SCALE, SOFTCAP)
    if CHECKED:
        seen = numbers[None, :] <= last[:, None]
        if WINDOW > 0:
            seen = seen & (numbers[None, :] > last[:, None] - WINDOW)
        if MASK == "row":
            seen = seen & (tl.load(mask_base + numbers * mask_stride_n, mask=there, other=0) != 0)[None, :]
        elif MASK != "none":
            mask_pointers = mask_base + m.to(tl.int64)[:, None] * mask_stride_m + numbers[None, :] * mask_stride_n
            given = tl.load(mask_pointers, mask=seen, other=0)
            if MASK == "bool":
                seen = seen & (given != 0)
            else:
                scores += given.to(tl.float32) * LOG2_E
        scores = tl.where(seen, scores, float("-inf"))
    better = tl.maximum(best, tl.max(scores, axis=1))
    shift = tl.where(better == float("-inf"), 0.0, better) if CHECKED else better
    weights = tl.exp2(scores - shift[:, None])
    decay = tl.exp2(best - shift)
    total = total * decay + tl.sum(weights, axis=1)
    acc = tl.dot(weights.to(vs.dtype), vs, acc * decay[:, None], input_precision=PRECISION)
    return better, total, acc
