"""Attention over a slot cache as plain torch functions: what our operators mean, and what runs when nothing is tuned.

Positions are data: every row of a batch has its own length, so masks come from `positions`, never from shapes.
"""

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

__all__ = ["append_kv", "cached_attention", "causal_attention"]


def append_kv(k_cache: Tensor, v_cache: Tensor, k: Tensor, v: Tensor, positions: Tensor) -> None:
    """Write new keys and values into the cache, in place.

    Args:
        k_cache: (batch, kv_heads, max_length, head_dim).
        v_cache: Like `k_cache`; its head_dim may be another.
        k: (batch, kv_heads, new, head_dim).
        v: As `v_cache` has it.
        positions: (batch, new) int64: the cache slot of each new token, inside the cache.
    """
    rows = torch.arange(k.shape[0], device=k.device).unsqueeze(1)
    index = (rows, positions)
    k_cache.transpose(1, 2).index_put_(index, k.transpose(1, 2))
    v_cache.transpose(1, 2).index_put_(index, v.transpose(1, 2))


def cached_attention(  # noqa: PLR0913, PLR0917 (an operator: its arguments are the call's)
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    positions: Tensor,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attend to the cache: query (b, t) sees the slots up to and including `positions[b, t]`.

    Args:
        q: (batch, heads, new, head_dim); heads is a multiple of the cache's.
        k_cache: (batch, kv_heads, max_length, head_dim); slots nobody sees must be finite.
        v_cache: Like `k_cache`; its head_dim may be another.
        positions: (batch, new) int64.
        scale: Of the scores.
        window: See only the last `window` slots.
        softcap: Scores become `softcap * tanh(scores / softcap)`.
        sinks: (heads,): a score of each head that takes its share of the weights and gives nothing.

    Returns:
        (batch, heads, new, head_dim of the values), new before heads in memory: joining heads afterwards is free.
    """
    slots = torch.arange(k_cache.shape[2], device=q.device)
    last = positions[:, None, :, None]
    visible = slots <= last
    if window is not None:
        visible = visible & (slots > last - window)
    return _grouped_attention(q, k_cache, v_cache, visible, scale, softcap, sinks)


def causal_attention(  # noqa: PLR0913, PLR0917 (an operator: its arguments are the call's)
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attend within fresh sequences: query t sees keys 0 to t, or the last `window` of them.

    Args:
        q: (batch, heads, length, head_dim); heads is a multiple of the keys'.
        k: (batch, kv_heads, length, head_dim).
        v: Like `k`; its head_dim may be another.
        scale: Of the scores.
        window: See only the last `window` keys.
        softcap: Scores become `softcap * tanh(scores / softcap)`.
        sinks: (heads,): a score of each head that takes its share of the weights and gives nothing.

    Returns:
        (batch, heads, length, head_dim of the values), length before heads in memory: joining heads afterwards is free.
    """
    length = q.shape[2]
    if softcap is None and sinks is None and (window is None or window >= length):
        grouped = q.shape[1] != k.shape[1]
        return _rows_first(scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=grouped))
    index = torch.arange(length, device=q.device)
    distance = index[:, None] - index[None, :]
    visible = distance >= 0
    if window is not None:
        visible = visible & (distance < window)
    return _grouped_attention(q, k, v, visible[None, None], scale, softcap, sinks)


def _grouped_attention(  # noqa: PLR0913, PLR0917 (see above)
    q: Tensor, k: Tensor, v: Tensor, visible: Tensor, scale: float, softcap: float | None, sinks: Tensor | None
) -> Tensor:
    """Attention under a mask with the query heads that share a key head folded into the query length.

    Keys and values are so read once per key head, and the kernels that know no grouped queries serve too.
    `visible` is (batch or 1, 1, new, keys).
    """
    batch, heads, new, head_dim = q.shape
    kv_heads, value_dim = k.shape[1], v.shape[3]
    group = heads // kv_heads
    folded = q.reshape(batch, kv_heads, group * new, head_dim)
    if group > 1:
        visible = visible.expand(-1, group, -1, -1).reshape(visible.shape[0], 1, group * new, visible.shape[-1])
    if softcap is None and sinks is None:
        out = scaled_dot_product_attention(folded, k, v, attn_mask=visible, scale=scale)
    else:
        scores = torch.matmul(folded.float() * scale, k.float().transpose(-1, -2))
        if softcap is not None:
            scores = torch.tanh(scores / softcap) * softcap
        scores = scores.masked_fill(~visible, float("-inf"))
        if sinks is None:
            weights = torch.softmax(scores, dim=-1)
        else:
            sink = sinks.float().reshape(1, kv_heads, group, 1).expand(batch, -1, -1, new).reshape(*scores.shape[:3], 1)
            weights = torch.softmax(torch.cat([scores, sink], dim=-1), dim=-1)[..., :-1]
        out = torch.matmul(weights, v.float()).to(q.dtype)
    return _rows_first(out.reshape(batch, heads, new, value_dim))


def _rows_first(out: Tensor) -> Tensor:
    """Lay (batch, heads, new, head_dim) out as (batch, new, heads, head_dim); most attention kernels do so already."""
    return out.transpose(1, 2).contiguous().transpose(1, 2)
