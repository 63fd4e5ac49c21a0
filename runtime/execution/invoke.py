"""Turn operator calls into closures over a slot list: names, constants and arity are settled once, not per call.

A prepared step takes the list of all values of a run, reads its arguments by index and writes its results by index.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from operator import itemgetter
from typing import Any

import torch

from tune_model.runtime.errors import TuneModelError
from tune_model.runtime.execution.direct import direct_binding
from tune_model.runtime.operators.allowed import resolve, returns_list
from tune_model.runtime.program import Arg, Call, Items, Real, Ref, Size, TorchName

__all__ = ["PreparedStep", "ProgramError", "Slots", "prepare_call", "references", "torch_dtype", "torch_name"]

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


def references(args: Sequence[Arg]) -> list[str]:
    """Return the values that arguments refer to, each once."""
    names: dict[str, None] = {}
    for arg in args:
        if isinstance(arg, Ref):
            names[arg.name] = None
        elif isinstance(arg, Items):
            names.update(dict.fromkeys(references(arg.items)))
    return list(names)


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
    function: Callable[..., Any], indices: tuple[int, ...], tail: tuple[object, ...], target: int
) -> PreparedStep:
    """Call with one to three slots followed by constants and keep the one result: nearly every call of a model."""
    a, b, c = (*indices, 0, 0)[:3]

    def one(s: Slots) -> None:
        s[target] = function(s[a])

    def one_and_more(s: Slots) -> None:
        s[target] = function(s[a], *tail)

    def two(s: Slots) -> None:
        s[target] = function(s[a], s[b])

    def two_and_more(s: Slots) -> None:
        s[target] = function(s[a], s[b], *tail)

    def three(s: Slots) -> None:
        s[target] = function(s[a], s[b], s[c])

    def three_and_more(s: Slots) -> None:
        s[target] = function(s[a], s[b], s[c], *tail)

    bare, more = ((one, one_and_more), (two, two_and_more), (three, three_and_more))[len(indices) - 1]
    return more if tail else bare


def _general(function: Callable[..., Any], args: list[object], kwargs: dict[str, object]) -> Callable[[Slots], Any]:
    """Return what fills in the arguments, however nested, and calls."""
    sources = {k: _source(v) for k, v in kwargs.items() if _has_hole(v)}
    if len(sources) < len(kwargs):
        function = partial(function, **{k: v for k, v in kwargs.items() if k not in sources})
    places = [(i, _source(a)) for i, a in enumerate(args) if _has_hole(a)]

    def call(slots: Slots) -> Any:
        filled = args.copy()
        for place, get in places:
            filled[place] = get(slots)
        if sources:
            return function(*filled, **{k: get(slots) for k, get in sources.items()})
        return function(*filled)

    return call


def _function(call: Call) -> Callable[..., Any]:
    """Return the quickest way to call an operator that the policy allows."""
    operator = resolve(call.op)
    direct = direct_binding(call.op, frozenset(k for k, _ in call.kwargs))
    if direct is not None:
        return direct
    # What an overload's __call__ does, one Python frame shorter.
    return getattr(operator, "_op", operator) if isinstance(operator, torch._ops.OpOverload) else operator


def prepare_call(
    call: Call, slots: Mapping[str, int], device: torch.device, made: Mapping[str, int] | None = None
) -> PreparedStep:
    """Prepare an operator call over a slot list.

    Args:
        call: With every size an integer.
        slots: Index of every value it reads, and of those it makes where `made` is not given.
        device: Where the program runs.
        made: Index of every value it makes.

    Raises:
        OperatorError: The operator is not allowed.
        ProgramError: An argument or a result has no slot, or a torch name does not exist.
    """
    args = [_argument(a, slots, device) for a in call.args]
    kwargs = {k: _argument(a, slots, device) for k, a in call.kwargs}
    targets = slots if made is None else made
    results = tuple((i, targets[name]) for i, name in enumerate(call.results) if name is not None)
    function = _function(call)
    single = bool(results) and not returns_list(call.op)
    holes = [a.index for a in args if isinstance(a, _Hole)]
    tail = tuple(args[len(holes) :])
    leading = 1 <= len(holes) <= 3 and not any(_has_hole(a) for a in tail)
    if single and leading and not any(_has_hole(v) for v in kwargs.values()):
        return _leading(partial(function, **kwargs) if kwargs else function, tuple(holes), tail, results[0][1])
    invoke = _general(function, args, kwargs)
    if single:
        target = results[0][1]

        def run(slots: Slots) -> None:
            slots[target] = invoke(slots)

    elif results:

        def run(slots: Slots) -> None:
            values = invoke(slots)
            for position, index in results:
                slots[index] = values[position]

    else:

        def run(slots: Slots) -> None:
            invoke(slots)

    return run
