"""New keys and values into their slots of the cache, where attention does not write them itself."""

import triton
import triton.language as tl

from tune_model.tune.triton.kernels.dependency import wait_for_predecessor


@triton.jit
def append(
    k_new,
    v_new,
    k_cache,
    v_cache,
    positions,
    tokens,
    positions_stride_b,
    positions_stride_t,
    kn_stride_b,
    kn_stride_h,
    kn_stride_t,
    vn_stride_b,
    vn_stride_h,
    vn_stride_t,
    kc_stride_b,
    kc_stride_h,
    kc_stride_n,
    vc_stride_b,
    vc_stride_h,
    vc_stride_n,
    HEAD_DIM: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PDL: tl.constexpr,
):
    """Copy BLOCK_T tokens of one key/value head of one row."""
    wait_for_predecessor(PDL)
    head = tl.program_id(1).to(tl.int64)
    row = tl.program_id(2).to(tl.int64)
    t = (tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T))[:, None].to(tl.int64)
    d = tl.arange(0, BLOCK_D)[None, :]
    is_token = t < tokens
    slots = tl.load(positions + row * positions_stride_b + t * positions_stride_t, mask=is_token, other=0).to(tl.int64)
    inside = is_token & (d < HEAD_DIM)
    ks = tl.load(k_new + row * kn_stride_b + head * kn_stride_h + t * kn_stride_t + d, mask=inside)
    vs = tl.load(v_new + row * vn_stride_b + head * vn_stride_h + t * vn_stride_t + d, mask=inside)
    tl.store(k_cache + row * kc_stride_b + head * kc_stride_h + slots * kc_stride_n + d, ks, mask=inside)
    tl.store(v_cache + row * vc_stride_b + head * vc_stride_h + slots * vc_stride_n + d, vs, mask=inside)
