"""Attention as one step: what transformers models call instead of their own attention while they are traced.

`causal_attention_steps` makes every attention layer of a decoder one `tune_model.attention` call and keeps count. Its
mask is an opaque object: a model that only hands it to its attention layers works, one that looks inside fails loudly
instead of losing its mask. What the mask lets through is checked by evaluating the model's mask rule at the places
where causal and sliding-window masks differ.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, cast

import torch
from torch.utils._python_dispatch import _disable_current_modes

from tune_model.extract.tracing.front_end import TraceError, UnknownAttentionError

__all__ = ["ATTENTION", "AttentionLog", "CausalMask", "causal_attention_steps", "classify_mask", "encoder_attention"]

ATTENTION = "tune_model.attention.default"
"""The operator's name in a raw graph: (query, key, value, scale, window, softcap, sinks) -> [B, H, T, D]."""

_NAME = "tune_model"


@torch.library.custom_op("tune_model::attention", mutates_args=())
def attention(  # noqa: PLR0913, PLR0917 (an operator: its arguments are the call's)
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scale: float,
    window: int | None,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Causal attention over this call's own keys; a placeholder that only tracing sees."""
    raise NotImplementedError


@attention.register_fake
def _(query: torch.Tensor, _key: torch.Tensor, value: torch.Tensor, *_settings: object) -> torch.Tensor:
    batch, heads, length, _ = query.shape
    # In memory [B, T, H, D], as flash attention leaves it, so that merging the heads is free.
    return query.new_empty(batch, length, heads, value.shape[-1]).transpose(1, 2)


class CausalMask(NamedTuple):
    """Stands for a mask on its way through a model: causal, and at most `window` keys back."""

    window: int | None


class AttentionLog:
    """What the attention layers did during one trace.

    Attributes:
        layers: Class name of each attention module, in calling order.
        masks: How many masks the model asked for.
    """

    def __init__(self) -> None:
        self.layers: list[str] = []
        self.masks = 0


# Arguments that change nothing here: dropout is off, positions are already in the rotated queries and keys.
_HARMLESS = frozenset(
    {
        "cache",
        "cache_position",
        "deterministic",
        "dropout",
        "layer_idx",
        "output_attentions",
        "output_hidden_states",
        "past_key_value",
        "past_key_values",
        "position_embeddings",
        "position_ids",
        "return_dict",
        "sliding_window",
        "training",
        "use_cache",
    }
)

_KNOWN_AS = {"position_bias": "a bias for every distance"}


def classify_mask(rule: Callable[..., Any], window: int | None) -> CausalMask | None:
    """Say which mask a rule describes; `None` when it is neither causal nor a causal sliding window.

    Args:
        rule: `rule(batch, head, query, key) -> bool`, on integer tensors.
        window: What the model claims; the claim is checked, and without one windows are not guessed.
    """
    reach = window or 64
    queries = sorted({0, 1, 2, reach - 1, reach, reach + 1, 2 * reach, 3 * reach + 5, 1_000_000})
    try:
        for query in queries:
            keys = torch.arange(query + 3)
            q = torch.full_like(keys, query)
            allowed = torch.as_tensor(rule(torch.zeros_like(keys), torch.zeros_like(keys), q, keys)).expand(keys.shape)
            expected = keys <= q
            if window is not None:
                expected &= keys > q - window
            if type(allowed) is not torch.Tensor or not torch.equal(allowed.bool(), expected):
                return None
    except Exception:  # noqa: BLE001 -- a rule that needs other arguments is some other mask, whatever it raises
        return None
    return CausalMask(window)


def _describe(module: torch.nn.Module) -> str:
    index = getattr(module, "layer_idx", None)
    return type(module).__name__ if index is None else f"{type(module).__name__} of layer {index}"


@contextmanager
def _registered(attention_function: Callable[..., Any], mask_function: Callable[..., Any]) -> Iterator[str]:
    """Register an attention implementation with transformers for the duration of a trace; yields its name."""
    from transformers import masking_utils
    from transformers.modeling_utils import AttentionInterface

    masks = masking_utils.AttentionMaskInterface
    # Positions of one row are consecutive here, so nothing is packed; the check for it would become 5 steps a model.
    packed = masking_utils.find_packed_sequence_indices
    AttentionInterface.register(_NAME, attention_function)
    masks.register(_NAME, mask_function)
    masking_utils.find_packed_sequence_indices = lambda *_, **__: None
    try:
        yield _NAME
    finally:
        masking_utils.find_packed_sequence_indices = packed
        AttentionInterface._global_mapping.pop(_NAME, None)
        masks._global_mapping.pop(_NAME, None)


@contextmanager
def causal_attention_steps(log: AttentionLog) -> Iterator[str]:
    """Register the one-step attention for decoders; yields the name to build the model with."""

    def mask(*, mask_function: Callable[..., Any], local_size: int | None = None, **given: Any) -> CausalMask:
        if given.get("attention_mask") is not None:
            raise TraceError("the model makes its own padding mask; expected none for a causal language model")
        with _disable_current_modes():
            found = classify_mask(mask_function, local_size)
        if found is None:
            raise TraceError(
                f"the model masks attention in a way that is neither causal nor a sliding window (window: {local_size})"
            )
        return found

    def attend(  # noqa: PLR0913, PLR0917 (transformers calls it)
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: Any,
        scaling: float | None = None,
        softcap: float | None = None,
        is_causal: bool | None = None,
        s_aux: torch.Tensor | None = None,
        **others: Any,
    ) -> tuple[torch.Tensor, None]:
        where = _describe(module)
        if not isinstance(attention_mask, CausalMask):
            raise TraceError(f"{where} got {_kind(attention_mask)} as its mask; expected a causal one")
        if is_causal is False or getattr(module, "is_causal", True) is False:
            raise TraceError(f"{where} is not causal; expected a decoder's self-attention")
        passed = sorted(k for k, v in others.items() if v is not None and v is not False and k not in _HARMLESS)
        unknown = [f"{k} ({_KNOWN_AS[k]})" if k in _KNOWN_AS else k for k in passed]
        if unknown:
            raise TraceError(f"{where} passes {', '.join(unknown)} to its attention, which programs do not have")
        if others.get("dropout"):
            raise TraceError(f"{where} applies dropout in evaluation mode")
        if query.shape[1] % key.shape[1] or key.shape[1] != value.shape[1]:
            raise TraceError(f"{where} has {query.shape[1]} query, {key.shape[1]} key and {value.shape[1]} value heads")
        if s_aux is not None and s_aux.shape != query.shape[1:2]:
            raise TraceError(f"{where} has sinks of shape {tuple(s_aux.shape)}; expected one for each query head")
        log.layers.append(type(module).__name__)
        scale = float(scaling) if scaling is not None else float(query.shape[-1]) ** -0.5
        cap = None if softcap is None else float(softcap)
        output = attention(query, key, value, scale, attention_mask.window, cap, s_aux)
        return output.transpose(1, 2).contiguous(), None

    with _registered(attend, mask) as name:
        yield name


def _kind(mask: Any) -> str:
    return f"a {mask.dtype} tensor" if isinstance(mask, torch.Tensor) else repr(mask)


@contextmanager
def encoder_attention(log: AttentionLog) -> Iterator[str]:
    """Register scaled_dot_product_attention without mask inflation; yields the name to build the model with.

    A padding mask stays [B, 1, 1, S] and broadcasts; a plain causal mask becomes `is_causal`; keys and values of
    grouped-query attention are not repeated. Other masks are built as transformers builds them.
    """
    from transformers import masking_utils

    def mask(*, mask_function: Callable[..., Any], **given: Any) -> torch.Tensor | None:
        log.masks += 1
        padding, window = given.get("attention_mask"), given.get("local_size")
        if mask_function is masking_utils.bidirectional_mask_function and window is None:
            return padding.to(torch.bool)[:, None, None, :] if isinstance(padding, torch.Tensor) else None
        if mask_function is masking_utils.causal_mask_function and window is None and padding is None:
            return None
        built = masking_utils.sdpa_mask(mask_function=mask_function, **{**given, "allow_is_causal_skip": False})
        return cast("torch.Tensor | None", built)

    def attend(  # noqa: PLR0913, PLR0917 (transformers calls it)
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        scaling: float | None = None,
        softcap: float | None = None,
        is_causal: bool | None = None,
        **others: Any,
    ) -> tuple[torch.Tensor, None]:
        unknown = sorted(k for k in ("position_bias", "s_aux", "head_mask") if others.get(k) is not None)
        if softcap is not None or unknown:
            raise UnknownAttentionError(
                f"{_describe(module)} passes {', '.join(unknown) or 'softcap'} to its attention"
            )
        log.layers.append(type(module).__name__)
        causal = is_causal if is_causal is not None else getattr(module, "is_causal", True)
        grouped = query.shape[1] != key.shape[1]
        output = torch.nn.functional.scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=attention_mask,
            scale=scaling,
            is_causal=bool(causal) and attention_mask is None,
            **({"enable_gqa": True} if grouped else {}),
        )
        return output.transpose(1, 2).contiguous(), None

    with _registered(attend, mask) as name:
        yield name
