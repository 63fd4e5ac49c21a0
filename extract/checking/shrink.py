"""Small copies of transformers configurations: few layers, small sizes, the same structure.

What makes a model special stays: every kind of layer, grouped heads, windows (made short enough to matter in a short
sequence), rotary settings, activation, norms and soft caps.
"""

import copy
from collections.abc import Iterator
from typing import Any

__all__ = ["small_configs"]

_HEAD_DIM = 16
_VOCABULARY = 256
_LAYERS_AT_MOST = 8

_LAYER_COUNTS = ("num_hidden_layers", "encoder_layers", "decoder_layers")
_WIDTHS = ("intermediate_size", "encoder_ffn_dim", "decoder_ffn_dim", "ffn_dim", "moe_intermediate_size")


def small_configs(config: Any) -> Iterator[Any]:
    """Yield smaller and smaller changes to a configuration, best first: all sizes, only layers and words, none.

    A configuration's fields depend on each other in ways only its model knows, so the caller takes the first that
    builds.
    """
    for shrink in (_shrink_sizes, _shrink_layers):
        small = copy.deepcopy(config)
        try:
            for part in _parts(small):
                shrink(part)
        except Exception:  # noqa: BLE001, S112 -- configurations validate assignments, each in its own way
            continue
        yield small
    yield copy.deepcopy(config)


def _parts(config: Any) -> list[Any]:
    names = getattr(type(config), "sub_configs", None) or {}
    parts = [config, *(getattr(config, name, None) for name in names)]
    return [p for p in parts if p is not None]


def _get(config: Any, name: str) -> int | None:
    value = getattr(config, name, None)
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _shrink_layers(config: Any) -> None:
    """Keep the first layers, but one of each kind; few words, short windows, small pictures."""
    count = _get(config, "num_hidden_layers")
    kept = 2
    kinds = getattr(config, "layer_types", None)
    if count and kinds and len(kinds) == count:
        kept = max(2, *(kinds.index(kind) + 1 for kind in set(kinds)))
    kept = min(kept, _LAYERS_AT_MOST)
    if count and count > kept:
        for name, value in list(vars(config).items()):
            if isinstance(value, list | tuple) and len(value) == count:
                setattr(config, name, value[:kept])
    _lower(config, dict.fromkeys(_LAYER_COUNTS, kept))
    _shrink_vocabulary(config)
    _lower(config, {"sliding_window": 4, "max_source_positions": 20})
    patch, image = _get(config, "patch_size"), _get(config, "image_size")
    if patch and image and image > 4 * patch:
        config.image_size = 4 * patch


def _lower(config: Any, limits: dict[str, int]) -> None:
    for name, limit in limits.items():
        if (_get(config, name) or 0) > limit:
            setattr(config, name, limit)


def _shrink_vocabulary(config: Any) -> None:
    if (_get(config, "vocab_size") or 0) <= _VOCABULARY:
        return
    config.vocab_size = _VOCABULARY
    for name in ("pad_token_id", "bos_token_id", "eos_token_id", "decoder_start_token_id"):
        token = getattr(config, name, None)
        if isinstance(token, list) or (isinstance(token, int) and token >= _VOCABULARY):
            setattr(config, name, 0)


def _shrink_sizes(config: Any) -> None:
    """Also make heads and widths small; the ratio of query to key heads stays where it is small."""
    _shrink_layers(config)
    heads, hidden = _get(config, "num_attention_heads"), _get(config, "hidden_size")
    if not heads or not hidden:
        return
    key_heads = _get(config, "num_key_value_heads") or heads
    small_key_heads = min(key_heads, 2)
    small_heads = small_key_heads * min(max(heads // key_heads, 1), 8)
    if key_heads == heads:
        small_heads = small_key_heads = min(heads, 4)
    head_dim = _get(config, "head_dim")
    separate = head_dim is not None and head_dim * heads != hidden
    for name in ("num_attention_heads", "encoder_attention_heads", "decoder_attention_heads"):
        if _get(config, name):
            setattr(config, name, small_heads)
    if _get(config, "num_key_value_heads"):
        config.num_key_value_heads = small_key_heads
    if head_dim is not None:
        config.head_dim = _HEAD_DIM
    config.hidden_size = small_heads * _HEAD_DIM + (_HEAD_DIM if separate else 0)
    for name in ("query_pre_attn_scalar", "word_embed_proj_dim"):
        if _get(config, name):
            setattr(config, name, config.hidden_size)
    _lower(config, dict.fromkeys(_WIDTHS, 96))
