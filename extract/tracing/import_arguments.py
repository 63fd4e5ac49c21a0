"""Arguments and types of graph nodes, as programs write them."""

import math
from collections.abc import Mapping
from typing import Any

import sympy
import torch
from torch.fx import Node
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

from tune_model.extract.sizes import SizePrinter, is_row_major
from tune_model.extract.tracing.front_end import TraceError
from tune_model.runtime.program import Arg, Items, Real, Ref, Size, TensorType, TorchName

__all__ = ["ArgumentWriter", "Layout", "dtype_name"]

Layout = tuple[tuple[sympy.Expr, ...], tuple[sympy.Expr, ...]]


def dtype_name(value: torch.Tensor) -> str:
    """Return torch's name of a tensor's dtype, without the prefix."""
    return str(value.dtype).removeprefix("torch.")


class ArgumentWriter:
    """Writes arguments and types over the program's symbols and value names.

    Args:
        printer: Of sizes.
        names: The program's value for each node, several for a node with several results; grows while importing.
    """

    def __init__(self, printer: SizePrinter, names: Mapping[Node, str | tuple[str, ...]]) -> None:
        self._printer = printer
        self._names = names

    def value(self, node: Node) -> str:
        """Return the program's name for a node that is one tensor."""
        name = self._names.get(node)
        if not isinstance(name, str):
            raise TraceError(f"the graph uses {node.name} where one tensor is expected")
        return name

    def size(self, size: int | torch.SymInt) -> Arg:
        """Write an integer."""
        dim = self._printer.print(size)
        return Size(dim) if isinstance(dim, str) else dim

    def shape(self, value: torch.Tensor) -> Items:
        """Write a tensor's shape as an argument."""
        return Items(tuple(self.size(s) for s in value.shape))

    def argument(self, arg: Any) -> Arg:  # noqa: PLR0911 (one line for each kind of argument)
        """Write any argument of an operator.

        Raises:
            TraceError: Programs cannot hold it.
        """
        match arg:
            case Node():
                return self._node(arg)
            case list() | tuple():
                return Items(tuple(self.argument(a) for a in arg))
            case torch.SymInt():
                return self.size(arg)
            case float() if not math.isfinite(arg):
                return Real("nan" if math.isnan(arg) else "inf" if arg > 0 else "-inf")
            case bool() | int() | float() | str() | None:
                return arg
            case torch.dtype():
                return TorchName("dtype", str(arg).removeprefix("torch."))
            case torch.layout():
                return TorchName("layout", str(arg).removeprefix("torch."))
            case torch.memory_format():
                return TorchName("memory_format", str(arg).removeprefix("torch."))
            case torch.device():
                return TorchName("device", "device")
            case complex():
                raise TraceError(
                    f"an operator takes the complex number {arg!r}; expected complex numbers in tensors only, such as a"
                    " buffer of the model"
                )
        raise TraceError(f"an operator takes {arg!r}, a {type(arg).__name__}; expected tensors, numbers, text or types")

    def _node(self, node: Node) -> Arg:
        value = node.meta.get("val")
        if isinstance(value, torch.SymInt | int) and not isinstance(value, bool):
            return self.size(value)
        if isinstance(value, torch.SymFloat | torch.SymBool):
            if free_unbacked_symbols(value):
                raise TraceError(
                    f"the model takes the number out of a tensor ({node.name}) and computes with it; expected tensors"
                    " throughout, since a number read while the model runs cannot be part of a program"
                )
            raise TraceError(f"the graph computes {node.name}, a number that depends on a size; expected integers")
        return Ref(self.value(node))

    def layout(self, value: torch.Tensor) -> Layout:
        """Return shape and strides, comparable; the stride of a dim of size 1 means nothing and is 0."""
        shape = tuple(self._printer.named(s) for s in value.shape)
        strides = (self._printer.named(s) for s in value.stride())
        return shape, tuple(sympy.Integer(0) if n == 1 else s for n, s in zip(shape, strides, strict=True))

    def type(self, value: torch.Tensor) -> TensorType:
        """Return a tensor's type."""
        shape = tuple(self._printer.named(s) for s in value.shape)
        strides = tuple(self._printer.named(s) for s in value.stride())
        sizes = tuple(self._printer.print_expression(s) for s in shape)
        if is_row_major(shape, strides):
            return TensorType(dtype_name(value), sizes)
        return TensorType(dtype_name(value), sizes, tuple(self._printer.print_expression(s) for s in strides))
