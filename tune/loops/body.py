"""A form's body with everything known: each call's arguments by name, each value's dtype and shape.

Shapes and promotion are torch's own: the body runs once on meta tensors.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch

from tune_model.runtime.expression import evaluate
from tune_model.runtime.program import Arg, Call, Form, Items, Real, Ref, Size, TensorType, TorchName

__all__ = ["Body", "Step", "Unsupported", "Value", "dtype_name", "read_body", "to_torch"]


class Unsupported(Exception):  # noqa: N818 - becomes a `Rejected` value
    """The body cannot be expressed; the text says what stands in the way."""


class Value(NamedTuple):
    """Type of a value: dtype name, shape, and strides in elements."""

    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]


class Step(NamedTuple):
    """One call.

    Attributes:
        op: Without the overload: `aten.add`.
        overload: `Tensor`.
        arguments: By schema name, defaults filled in; tensors are `Ref`s, lists are tuples.
        results: Names.
    """

    op: str
    overload: str
    arguments: dict[str, Any]
    results: tuple[str | None, ...]


class Body(NamedTuple):
    """All steps, the type of every value, and which step and result makes it."""

    steps: tuple[Step, ...]
    values: dict[str, Value]
    producers: dict[str, tuple[Step, int]]


def dtype_name(dtype: torch.dtype) -> str:
    """Return torch's name without the prefix."""
    return str(dtype).removeprefix("torch.")


def to_torch(name: str) -> torch.dtype:
    """Return the dtype of a name."""
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise Unsupported(f"dtype {name!r}")
    return dtype


def _value(tensor: torch.Tensor) -> Value:
    return Value(dtype_name(tensor.dtype), tuple(tensor.shape), tuple(tensor.stride()))


def _meta(type_: TensorType) -> torch.Tensor:
    shape = tuple(evaluate(s, {}) for s in type_.shape)
    dtype = to_torch(type_.dtype)
    if type_.strides is None:
        return torch.empty(shape, dtype=dtype, device="meta")
    return torch.empty_strided(shape, tuple(evaluate(s, {}) for s in type_.strides), dtype=dtype, device="meta")


def _overload(op: str) -> Any:
    namespace, _, rest = op.partition(".")
    name, _, overload = rest.partition(".")
    if namespace != "aten":
        raise Unsupported(f"operator {op}")
    packet = getattr(torch.ops.aten, name, None)
    found = getattr(packet, overload, None)
    if found is None:
        raise Unsupported(f"operator {op}")
    return found


def _plain(arg: Arg, tensor: Callable[[str], Any]) -> Any:
    match arg:
        case Ref(name):
            return tensor(name)
        case Items(items):
            return [_plain(a, tensor) for a in items]
        case Size(expression):
            return evaluate(expression, {})
        case Real(text):
            return float(text)
        case TorchName("dtype", name):
            return to_torch(name)
        case TorchName("memory_format" | "layout", name):
            return getattr(torch, name)
        case TorchName():
            return torch.device("meta")
        case _:
            return arg


def _freeze(value: Any) -> Any:
    return (
        tuple(_freeze(v) for v in value) if isinstance(value, (list, tuple)) and not isinstance(value, Ref) else value
    )


def _run(call: Call, tensors: Mapping[str, torch.Tensor]) -> tuple[Step, list[torch.Tensor | None]]:
    overload = _overload(call.op)

    def look_up(name: str) -> torch.Tensor:
        if name not in tensors:
            raise Unsupported(f"{call.op} reads {name}, which nothing makes")
        return tensors[name]

    schema = overload._schema.arguments
    args = [_plain(a, look_up) for a in call.args]
    kwargs = {k: _plain(a, look_up) for k, a in call.kwargs}
    if any(a.name == "device" for a in schema) and not any(isinstance(a, torch.Tensor) for a in args):
        kwargs["device"] = torch.device("meta")
    try:
        out = overload(*args, **kwargs)
    except (RuntimeError, TypeError, NotImplementedError, IndexError, ValueError) as error:
        raise Unsupported(f"{call.op} on meta tensors: {str(error).splitlines()[0]}") from error
    outs = list(out) if isinstance(out, (list, tuple)) else [out]
    names = {a.name: a.default_value for a in schema if a.has_default_value()}
    for argument, given in zip(schema, call.args, strict=False):
        names[argument.name] = _plain(given, Ref)
    for key, given in call.kwargs:
        names[key] = _plain(given, Ref)
    op, _, overload_name = call.op.rpartition(".")
    return Step(op, overload_name, {k: _freeze(v) for k, v in names.items()}, call.results), outs


def read_body(form: Form) -> Body:
    """Type a concrete form's body.

    Raises:
        Unsupported: An operator is unknown, or torch refuses the call.
    """
    tensors = {p.name: _meta(p.type) for p in form.parameters}
    values = {name: _value(t) for name, t in tensors.items()}
    steps: list[Step] = []
    producers: dict[str, tuple[Step, int]] = {}
    for call in form.body:
        step, outs = _run(call, tensors)
        steps.append(step)
        for position, (name, tensor) in enumerate(zip(step.results, outs, strict=False)):
            if name is not None and isinstance(tensor, torch.Tensor):
                tensors[name] = tensor
                values[name] = _value(tensor)
                producers[name] = (step, position)
    return Body(tuple(steps), values, producers)
