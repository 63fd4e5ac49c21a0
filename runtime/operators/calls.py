"""Calls of torch functions as their operators' schemas have them, with rows collapsed: what single operators are.

Linear layers, products, norms, softmax, attention. Which kernel answers a call is in `replay`.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

__all__ = ["DEFAULTS", "READERS", "Asked", "Value"]

Value = Tensor | int | float | bool | tuple[int, ...] | None


class Asked(NamedTuple):
    """A call as its operator's schema has it.

    Attributes:
        op: The operator.
        args: Its arguments up to the last that is given; rows are collapsed.
        shape: Of the result.
    """

    op: str
    args: tuple[Value, ...]
    shape: tuple[int, ...]


def _rows(x: Tensor) -> Tensor | None:
    """See a tensor as a matrix of its last dim, if that moves nothing."""
    return x if x.dim() == 2 else x.view(-1, x.shape[-1]) if x.is_contiguous() and x.dim() > 0 else None


def _linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Asked | None:  # noqa: A002 (torch's name)
    rows = _rows(input)
    if rows is None or weight.dim() != 2:
        return None
    args = (rows, weight) if bias is None else (rows, weight, bias)
    return Asked("aten.linear.default", args, (*input.shape[:-1], weight.shape[0]))


def _matmul(input: Tensor, other: Tensor) -> Asked | None:  # noqa: A002 (torch's name)
    # A product with the transpose of a weight is what linear layers are.
    return _linear(input, other.t()) if other.dim() == 2 else None


def _rms_norm(
    input: Tensor,  # noqa: A002 (torch's name)
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    eps: float | None = None,
) -> Asked | None:
    rows = _rows(input)
    if rows is None or len(normalized_shape) != 1:
        return None
    return Asked("aten.rms_norm.default", (rows, tuple(normalized_shape), weight, eps), tuple(input.shape))


def _layer_norm(
    input: Tensor,  # noqa: A002 (torch's name)
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Asked | None:
    rows = _rows(input)
    if rows is None or len(normalized_shape) != 1:
        return None
    return Asked("aten.layer_norm.default", (rows, tuple(normalized_shape), weight, bias, eps), tuple(input.shape))


def _softmax(input: Tensor, dim: int | None = None, *_: Any, dtype: Any = None, **__: Any) -> Asked | None:  # noqa: A002
    rows = _rows(input)
    if rows is None or dtype is not None or dim not in {-1, input.dim() - 1}:
        return None
    return Asked("aten.softmax.int", (rows, -1), tuple(input.shape))


def _attention(  # noqa: PLR0913, PLR0917 (torch's arguments)
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Asked | None:
    if dropout_p or query.dim() != 4:
        return None
    args = (query, key, value, attn_mask, 0.0, is_causal, scale, enable_gqa)
    return Asked("aten.scaled_dot_product_attention.default", args, (*query.shape[:-1], value.shape[-1]))


READERS: Mapping[Callable[..., Any], Callable[..., Asked | None]] = {
    functional.linear: _linear,
    torch.matmul: _matmul,
    torch.mm: _matmul,
    Tensor.matmul: _matmul,
    Tensor.__matmul__: _matmul,
    Tensor.mm: _matmul,
    functional.rms_norm: _rms_norm,
    torch.rms_norm: _rms_norm,
    functional.layer_norm: _layer_norm,
    functional.softmax: _softmax,
    torch.softmax: _softmax,
    Tensor.softmax: _softmax,
    functional.scaled_dot_product_attention: _attention,
}

# Values that a schema gives to arguments which are left out.
DEFAULTS: Mapping[str, tuple[Value, ...]] = {
    "aten.linear.default": (None, None, None),
    "aten.rms_norm.default": (None, None, None, None),
    "aten.layer_norm.default": (None, None, None, None, 1e-5),
    "aten.softmax.int": (None, -1),
    "aten.scaled_dot_product_attention.default": (None, None, None, None, 0.0, False, None, False),
}
