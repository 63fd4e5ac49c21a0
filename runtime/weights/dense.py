"""Which tensors are dense: elements in memory, at strides. All other kinds have a name here."""

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

__all__ = ["not_dense"]


def not_dense(tensor: Tensor) -> str | None:
    """Say what a tensor is, if not dense; `None` for one that is, with or without values (on the meta device).

    Needs neither its shape nor its values, which some kinds refuse to tell.
    """
    if is_lazy(tensor):
        return "not initialised (of a lazy module)"
    if tensor.is_nested:
        return f"a nested tensor ({tensor.layout})"
    if tensor.layout != torch.strided:
        return f"a tensor of layout {tensor.layout}"
    if tensor.is_quantized:
        return f"a quantised tensor ({tensor.dtype})"
    if hasattr(type(tensor), "__tensor_flatten__") or hasattr(tensor, "fake_mode"):
        return f"a {type(tensor).__name__}"  # made of other tensors, or of none
    return None
