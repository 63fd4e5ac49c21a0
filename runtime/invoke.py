"""Turn operator calls into closures over a slot list: names, constants and arity are settled once, not per call.

A prepared step takes the list of all values of a run, reads its arguments by index and writes its results by index.
"""

from collections.abc import Callable, Mapping
from functools import partial
from operator import itemgetter
from typing import Any

import torch

from tune_model.runtime.errors import TuneModelError
from tune_model.runtime.operators import resolve, returns_list
from tune_model.runtime.program import Arg, Call, Items, Real, Ref, Size, TorchName

__all__ = ["PreparedStep", "ProgramError", "Slots", "prepare_call", "torch_dtype", "torch_name"]

Slots = list[Any]
"""All values of one run by index."""

PreparedStep = Callable[[Slots], None]

_KINDS = {"dtype": torch.dtype, "layout": torch.layout, "memory_format": torch.memory_format}


class ProgramError(TuneModelError):
    """A program is malformed: it names a value, a type or a form that does not exist, or its types do not fit."""


def torch_dtype(name: str) -> torch.dtype:
    """Return the dtype that torch calls by this name.

    Raises:
        ProgramError: There is none.
    """
    value = torch_name(TorchName("dtype", name), torch.device("cpu"))
    assert isinstance(value, torch.dtype)  # noqa: S101 (torch_name checked the kind)
    return value


def torch_name(name: TorchName, device: torch.device) -> object:
    """Return what a torch name stands for; every device is the one the program runs on.

    Raises:
        ProgramError: Torch has no such dtype, layout or memory format.
    """
    if name.kind == "device":
        return device
    value = getattr(torch, name.name, None)
    if not isinstance(value, _KINDS[name.kind]):
        raise ProgramError(f"torch has no {name.kind} {name.name!r}")
    return value


class _Hole:
    """A place in an argument tree that a slot fills at each call."""

    __slots__ = ("index",)

    def __init__(self, index: int) -> None:
        self.index = index


def _argument(arg: Arg, slots: Mapping[str, int], device: torch.device) -> object:
    """Resolve an argument to a constant, a hole, or a list of these."""
    match arg:
        case Ref(name):
            if name not in slots:
                raise ProgramError(f"value {name!r} is used before it is made")
            return _Hole(slots[name])
        case Items(items):
            return [_argument(item, slots, device) for item in items]
        case TorchName():
            return torch_name(arg, device)
        case Real(text):
            return float(text)
        case Size(expression):
            raise ProgramError(f"size {expression!r} is not bound to a value")
        case _:
            return arg


def _has_hole(value: object) -> bool:
    return isinstance(value, _Hole) or (isinstance(value, list) and any(_has_hole(v) for v in value))


def _fill(value: object, slots: Slots) -> object:
    if isinstance(value, _Hole):
        return slots[value.index]
    if isinstance(value, list):
        return [_fill(v, slots) for v in value]
    return value


def _source(value: object) -> Callable[[Slots], object]:
    """Return what reads one argument that has holes."""
    if isinstance(value, _Hole):
        return itemgetter(value.index)
    if isinstance(value, list) and all(isinstance(v, _Hole) for v in value) and len(value) > 1:
        get = itemgetter(*(v.index for v in value))
        return lambda slots: list(get(slots))
    return lambda slots: _fill(value, slots)


def _leading(
    function: Callable[..., Any], indices: tuple[int, ...], tail: tuple[object, ...]
) -> Callable[[Slots], Any]:
    """Call with one to four slots followed by constants: nearly every call of a model."""
    if len(indices) == 1:
        (a,) = indices
        return (lambda s: function(s[a], *tail)) if tail else (lambda s: function(s[a]))
    if len(indices) == 2:
        a, b = indices
        return (lambda s: function(s[a], s[b], *tail)) if tail else (lambda s: function(s[a], s[b]))
    if len(indices) == 3:
        a, b, c = indices
        return lambda s: function(s[a], s[b], s[c], *tail)
    a, b, c, d = indices
    return lambda s: function(s[a], s[b], s[c], s[d], *tail)


def _invocation(function: Callable[..., Any], args: list[object], kwargs: dict[str, object]) -> Callable[[Slots], Any]:
    """Return what calls `function` with its arguments filled in."""
    if any(_has_hole(v) for v in kwargs.values()):
        fixed = {k: v for k, v in kwargs.items() if not _has_hole(v)}
        sources = {k: _source(v) for k, v in kwargs.items() if _has_hole(v)}
        positional = [_source(a) if _has_hole(a) else (lambda _, a=a: a) for a in args]
        return lambda s: function(*[g(s) for g in positional], **fixed, **{k: g(s) for k, g in sources.items()})
    if kwargs:
        function = partial(function, **kwargs)
    holes = [i for i, a in enumerate(args) if _has_hole(a)]
    direct = all(isinstance(args[i], _Hole) for i in holes)
    if direct and 1 <= len(holes) <= 4 and holes == list(range(len(holes))):
        indices = tuple(a.index for a in args if isinstance(a, _Hole))
        return _leading(function, indices, tuple(args[len(holes) :]))
    if not holes:
        return lambda _: function(*args)
    places = [(i, _source(args[i])) for i in holes]

    def call(slots: Slots) -> Any:
        filled = args.copy()
        for place, get in places:
            filled[place] = get(slots)
        return function(*filled)

    return call


def prepare_call(call: Call, slots: Mapping[str, int], device: torch.device) -> PreparedStep:
    """Prepare an operator call over a slot list.

    Args:
        call: With every size an integer.
        slots: Index of every value it reads or makes.
        device: Where the program runs.

    Raises:
        OperatorError: The operator is not allowed.
        ProgramError: An argument or a result has no slot, or a torch name does not exist.
    """
    args = [_argument(a, slots, device) for a in call.args]
    kwargs = {k: _argument(a, slots, device) for k, a in call.kwargs}
    invoke = _invocation(resolve(call.op), args, kwargs)
    results = tuple((i, slots[name]) for i, name in enumerate(call.results) if name is not None)
    if not results:

        def run(slots: Slots) -> None:
            invoke(slots)

    elif returns_list(call.op):

        def run(slots: Slots) -> None:
            made = invoke(slots)
            for position, index in results:
                slots[index] = made[position]

    else:
        target = results[0][1]

        def run(slots: Slots) -> None:
            slots[target] = invoke(slots)

    return run
