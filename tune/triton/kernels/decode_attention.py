"""Attention of one new token per row over its cache, split over the keys.

Programs are (split, key/value head, row). The query heads that share a key/value head form one tile, so keys and values
are read once. Each row's length is read on the device and divided evenly between the splits, block by block: cost
follows the actual length, a graph captured once serves every position, and splits without work only make their queries,
which every split begins with while it waits for its row's position. The append of the new key and value is part of the
kernel: the last split with work takes them from the token itself, ends its running softmax with them, and writes them
to the cache; no other program touches that slot. Queries and keys are read as they are, or made by generated functions
(tune/triton/head_source): every split makes them again, which costs less than a kernel that makes them once.

The partial results of a row are joined by a second kernel, or by the program that arrives last.
"""

import triton
import triton.language as tl
from triton.language.extra import libdevice

from tune_model.tune.triton.kernels.dependency import ask, wait_for_predecessor
from tune_model.tune.triton.kernels.rows import consecutive

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def first_key(position, WINDOW: tl.constexpr):
    """Return the first cache slot that the query at `position` sees."""
    if WINDOW > 0:
        return tl.maximum(position - (WINDOW - 1), 0)
    else:  # noqa: RET505 (Triton evaluates both branches' types otherwise)
        return position * 0


@triton.jit
def blocks_per_split(keys, SPLITS: tl.constexpr, BLOCK_N: tl.constexpr):
    """Return how many blocks of keys each split takes; one block holds the new token's own slot too."""
    blocks = tl.cdiv(keys, BLOCK_N)
    return tl.cdiv(blocks, SPLITS)


@triton.jit
def cap_scores(scores, SCALE: tl.constexpr, SOFTCAP: tl.constexpr):
    """Scale raw scores to base-2 logits, soft-capped where the model does."""
    if SOFTCAP > 0:
        return libdevice.tanh(scores * (SCALE / SOFTCAP)) * (SOFTCAP * LOG2_E)
    else:  # noqa: RET505
        return scores * (SCALE * LOG2_E)


@triton.jit
def over(acc, total):
    """Divide a weighted sum by its weights; 0 where none had any, as in ATen's attention."""
    return acc / tl.where(total == 0.0, 1.0, total)


@triton.jit
def ask_for_cache(
    k_base,
    v_base,
    position,
    split,
    kc_stride_n,
    vc_stride_n,
    HEAD_DIM: tl.constexpr,
    WINDOW: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    AHEAD: tl.constexpr,
    DENSE: tl.constexpr,
):
    """Ask the second-level cache for a split's first AHEAD keys and values; the position may be an old one.

    Each request costs time. Where keys lie behind each other, DENSE, there is one for all of them.
    """
    start = first_key(position, WINDOW)
    span = blocks_per_split(position + 1 - start, SPLITS, BLOCK_N) * BLOCK_N
    low = start + split * span
    high = tl.minimum(low + span, position + 1)
    size: tl.constexpr = HEAD_DIM * k_base.dtype.element_ty.primitive_bitwidth // 8
    count: tl.constexpr = 1 if DENSE else AHEAD
    keys = low + tl.arange(0, count)
    sizes = (tl.minimum(high - keys, AHEAD) if DENSE else keys * 0 + 1) * size
    ask(k_base + keys.to(tl.int64) * kc_stride_n, sizes, keys < high, count)
    ask(v_base + keys.to(tl.int64) * vc_stride_n, sizes, keys < high, count)


@triton.jit
def take_keys(
    qs,
    k_base,
    v_base,
    low,
    high,
    kc_stride_n,
    vc_stride_n,
    HEAD_DIM: tl.constexpr,
    SCALE: tl.constexpr,
    SOFTCAP: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Attend over the cached keys from `low` to `high`.

    Returns:
        The largest logit (finite, so that scores of -inf weigh nothing), the sum of the weights, the weighted values.
    """
    d = tl.arange(0, BLOCK_D)
    in_row = d < HEAD_DIM
    best = tl.full((BLOCK_G,), -1e38, tl.float32)
    total = tl.zeros((BLOCK_G,), tl.float32)
    acc = tl.zeros((BLOCK_G, BLOCK_D), tl.float32)
    for n in tl.range(low, high, BLOCK_N):
        keys = n + tl.arange(0, BLOCK_N)
        inside = keys < high
        k_pointers = k_base + keys.to(tl.int64)[None, :] * kc_stride_n + d[:, None]
        ks = tl.load(k_pointers, mask=inside[None, :] & in_row[:, None], other=0.0)
        scores = cap_scores(tl.dot(qs, ks, input_precision=PRECISION), SCALE, SOFTCAP)
        scores = tl.where(inside[None, :], scores, float("-inf"))
        better = tl.maximum(best, tl.max(scores, axis=1))
        weights = tl.exp2(scores - better[:, None])
        decay = tl.exp2(best - better)
        v_pointers = v_base + keys.to(tl.int64)[:, None] * vc_stride_n + d[None, :]
        vs = tl.load(v_pointers, mask=inside[:, None] & in_row[None, :], other=0.0)
        acc = tl.dot(weights.to(vs.dtype), vs, acc * decay[:, None], input_precision=PRECISION)
        total = total * decay + tl.sum(weights, axis=1)
        best = better
    return best, total, acc


@triton.jit
def add_token(best, total, acc, score, value):
    """Put one more key into the running softmaxes; `value` is a row of `acc`."""
    better = tl.maximum(best, score)
    weight = tl.exp2(score - better)
    decay = tl.exp2(best - better)
    acc = acc * decay[:, None] + weight[:, None] * value
    return better, total * decay + weight, acc


@triton.jit
def leave_part(
    partial_out, partial_max, partial_sum, places, best, total, acc, in_group, in_row, columns, HEAD_DIM: tl.constexpr
):
    """Store partial results at their places."""
    tl.store(partial_max + places, best, mask=in_group)
    tl.store(partial_sum + places, total, mask=in_group)
    pointers = partial_out + places[:, None] * HEAD_DIM + columns[None, :]
    tl.store(pointers, acc, mask=in_group[:, None] & in_row[None, :])


@triton.jit
def attend(
    q,
    k_cache,
    v_cache,
    k_new,
    v_new,
    positions,
    sinks,
    out,
    partial_out,
    partial_max,
    partial_sum,
    counters,
    heads_of,
    positions_stride_b,
    q_stride_b,
    q_stride_h,
    kc_stride_b,
    kc_stride_h,
    kc_stride_n,
    vc_stride_b,
    vc_stride_h,
    vc_stride_n,
    kn_stride_b,
    kn_stride_h,
    vn_stride_b,
    vn_stride_h,
    out_stride_b,
    out_stride_h,
    slots,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    SCALE: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    APPEND: tl.constexpr,
    SINKS: tl.constexpr,
    SPLITS: tl.constexpr,
    LAST_JOINS: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
    AHEAD: tl.constexpr,
    DENSE: tl.constexpr,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
):
    """Attend over one split; of several, leave partial results for `combine`, or join all if the last."""
    split = tl.program_id(0)
    head = tl.program_id(1)
    row = tl.program_id(2)
    row64 = row.to(tl.int64)
    k_base = k_cache + row64 * kc_stride_b + head.to(tl.int64) * kc_stride_h
    v_base = v_cache + row64 * vc_stride_b + head.to(tl.int64) * vc_stride_h
    if AHEAD > 0:
        # Perhaps not this step's yet, so it is kept out of the first-level cache and inside the cache's slots.
        guess = tl.load(positions + row64 * positions_stride_b, cache_modifier=".cg").to(tl.int32)
        guess = tl.minimum(tl.maximum(guess, 0), slots - 1)
        ask_for_cache(
            k_base, v_base, guess, split, kc_stride_n, vc_stride_n, HEAD_DIM, WINDOW, SPLITS, BLOCK_N, AHEAD, DENSE
        )
    wait_for_predecessor(PDL)
    position = tl.load(positions + row64 * positions_stride_b).to(tl.int32)
    start = first_key(position, WINDOW)
    span = blocks_per_split(position + 1 - start, SPLITS, BLOCK_N) * BLOCK_N
    low = start + split * span

    # What the position does not decide is asked for beside it, not behind it.
    g = tl.arange(0, BLOCK_G)
    d = tl.arange(0, BLOCK_D)
    in_row = d < HEAD_DIM
    in_d = in_row[None, :]
    in_g = (g < GROUP)[:, None]
    if QUERIES is None:
        q_pointers = q + row64 * q_stride_b + (head * GROUP + g)[:, None] * q_stride_h + d[None, :]
        qs = tl.load(q_pointers, mask=in_g & in_d, other=0.0)
    else:
        count = tl.num_programs(2) * (KV_HEADS * GROUP)
        members = tl.where(in_g, (row * (KV_HEADS * GROUP) + head * GROUP + g)[:, None], count)
        qs = tl.where(in_g & in_d, QUERIES(members, count, heads_of, BLOCK_D), 0.0).to(k_cache.dtype.element_ty)
    kn = tl.zeros((BLOCK_D,), k_cache.dtype.element_ty)
    vn = tl.zeros((BLOCK_D,), v_cache.dtype.element_ty)
    if APPEND:
        if KEYS is None:
            kn = tl.load(k_new + row64 * kn_stride_b + head * kn_stride_h + d, mask=in_row, other=0.0)
        else:
            kn = tl.where(in_row, KEYS(consecutive(row * KV_HEADS + head, 1), 0, heads_of, BLOCK_D), 0.0)
        vn = tl.load(v_new + row64 * vn_stride_b + head * vn_stride_h + d, mask=in_row, other=0.0)
        kn = kn.to(k_cache.dtype.element_ty)
        vn = vn.to(v_cache.dtype.element_ty)
    sink = tl.full((BLOCK_G,), float("-inf"), tl.float32)
    if SINKS:
        sink = tl.load(sinks + head * GROUP + g, mask=g < GROUP, other=0.0).to(tl.float32) * LOG2_E

    if low <= position:
        high = tl.minimum(low + span, position + 1)
        cached = tl.minimum(high, position) if APPEND else high

        best, total, acc = take_keys(
            qs, k_base, v_base, low, cached, kc_stride_n, vc_stride_n,
            HEAD_DIM, SCALE, SOFTCAP, BLOCK_G, BLOCK_N, BLOCK_D, PRECISION,
        )  # fmt: skip
        if APPEND:  # noqa: SIM102 (one is the compiler's, one the kernel's)
            # After the loop, whose first loads would else wait for the new token's.
            if high == position + 1:
                slot = position.to(tl.int64)
                tl.store(k_base + slot * kc_stride_n + d, kn, mask=in_row)
                tl.store(v_base + slot * vc_stride_n + d, vn, mask=in_row)
                score = cap_scores(tl.sum(qs.to(tl.float32) * kn.to(tl.float32)[None, :], axis=1), SCALE, SOFTCAP)
                best, total, acc = add_token(best, total, acc, score, vn.to(tl.float32)[None, :])
        if SINKS:  # noqa: SIM102 (as above)
            if high == position + 1:
                best, total, acc = add_token(best, total, acc, sink, 0.0)

        heads = head * GROUP + g
        in_group = g < GROUP
        places = (row64 * (KV_HEADS * GROUP) + heads) * SPLITS + split
        used = tl.cdiv(position + 1 - start, span)
        if SPLITS == 1 or (LAST_JOINS and used == 1):
            out_pointers = out + row64 * out_stride_b + heads[:, None] * out_stride_h + d[None, :]
            tl.store(out_pointers, over(acc, total[:, None]).to(out.dtype.element_ty), mask=in_g & in_d)
        else:
            leave_part(
                partial_out, partial_max, partial_sum, places, best, total, acc, in_group, in_row, d, HEAD_DIM
            )  # fmt: skip
            if LAST_JOINS:
                # A barrier orders all threads' stores before the one thread's release; its acquire, and the barrier
                # that hands its value out, order the loads behind every other program's stores.
                tl.debug_barrier()
                counter = counters + row * KV_HEADS + head
                arrived = tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu")
                if arrived == used - 1:
                    first = (row64 * KV_HEADS + head) * GROUP
                    out_base = out + row64 * out_stride_b + head * GROUP * out_stride_h
                    join_group(
                        partial_out, partial_max, partial_sum, out_base, first,
                        used, out_stride_h, GROUP, HEAD_DIM, SPLITS, BLOCK_D,
                    )  # fmt: skip
                    tl.store(counter, 0)


@triton.jit
def join_group(
    partial_out,
    partial_max,
    partial_sum,
    out,
    first,
    used,
    out_stride_h,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Join the used parts of all heads of a group; `first` is the number of its first head.

    Loads go past the first-level cache, which knows nothing of other programs' stores. Those of a step wait for nothing
    but each other, and few parts are one step.
    """
    members: tl.constexpr = triton.next_power_of_2(GROUP)
    step_size: tl.constexpr = max(1, min(SPLITS, 64 // members))
    m = tl.arange(0, members)[:, None]
    s = tl.arange(0, step_size)[None, :]
    d = tl.arange(0, BLOCK_D)[None, None, :]
    places = (first + m) * SPLITS + s
    top = tl.full((members, 1), -1e38, tl.float32)
    total = tl.zeros((members, 1), tl.float32)
    acc = tl.zeros((members, BLOCK_D), tl.float32)
    for step in tl.range(0, used, step_size):
        inside = (m < GROUP) & (step + s < used)
        tops = tl.load(partial_max + places + step, mask=inside, other=float("-inf"), cache_modifier=".cg")
        sums = tl.load(partial_sum + places + step, mask=inside, other=0.0, cache_modifier=".cg")
        pointers = partial_out + (places + step)[:, :, None] * HEAD_DIM + d
        parts = tl.load(pointers, mask=inside[:, :, None] & (d < HEAD_DIM), other=0.0, cache_modifier=".cg")
        # Members that only fill up the tile have nothing: their weights are of no use, but must not trap.
        higher = tl.maximum(top, tl.max(tops, axis=1, keep_dims=True))
        weights = tl.exp2(tops - higher)
        decay = tl.exp2(top - higher)
        total = total * decay + tl.sum(weights * sums, axis=1, keep_dims=True)
        acc = acc * decay + tl.sum(weights[:, :, None] * parts, axis=1)
        top = higher
    result = over(acc, total)
    columns = tl.arange(0, BLOCK_D)[None, :]
    out_mask = (m < GROUP) & (columns < HEAD_DIM)
    tl.store(out + m * out_stride_h + columns, result.to(out.dtype.element_ty), mask=out_mask)


@triton.jit
def combine(
    partial_out,
    partial_max,
    partial_sum,
    positions,
    out,
    positions_stride_b,
    out_stride_b,
    out_stride_h,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    WINDOW: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PDL: tl.constexpr,
):
    """Join the parts of BLOCK_D values of one head of one row.

    What splits without keys did not write is read, and dropped.
    """
    wait_for_predecessor(PDL)
    head = tl.program_id(0)
    row64 = tl.program_id(1).to(tl.int64)
    position = tl.load(positions + row64 * positions_stride_b).to(tl.int32)
    keys = position + 1 - first_key(position, WINDOW)
    span = blocks_per_split(keys, SPLITS, BLOCK_N) * BLOCK_N
    s = tl.arange(0, BLOCK_S)
    d = tl.program_id(2) * BLOCK_D + tl.arange(0, BLOCK_D)
    used = (s < SPLITS) & (s * span < keys)
    places = (row64 * HEADS + head) * SPLITS + s
    # All parts are asked for beside the position that says which of them were written.
    there = s < SPLITS
    best = tl.where(used, tl.load(partial_max + places, mask=there, other=0.0), float("-inf"))
    sums = tl.where(used, tl.load(partial_sum + places, mask=there, other=0.0), 0.0)
    inside = there[:, None] & (d < HEAD_DIM)[None, :]
    parts = tl.load(partial_out + places[:, None] * HEAD_DIM + d[None, :], mask=inside, other=0.0)
    parts = tl.where(used[:, None], parts, 0.0)
    weights = tl.exp2(best - tl.max(best, axis=0))
    result = over(tl.sum(weights[:, None] * parts, axis=0), tl.sum(weights * sums, axis=0))
    tl.store(out + row64 * out_stride_b + head * out_stride_h + d, result.to(out.dtype.element_ty), mask=d < HEAD_DIM)
