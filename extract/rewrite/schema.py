"""ATen schemas: a call's arguments by name, and the shortest call that says the same."""

from collections.abc import Mapping
from functools import lru_cache
from typing import Any, NamedTuple

import torch

from tune_model.runtime.program import Arg, Call, Items

__all__ = ["arguments", "call", "is_known"]


class _Argument(NamedTuple):
    name: str
    has_default: bool
    default: Arg
    keyword_only: bool


def _default(value: Any) -> Arg:
    if isinstance(value, list | tuple):
        return Items(tuple(_default(v) for v in value))
    return value if isinstance(value, bool | int | float | str) else None


@lru_cache(maxsize=4096)
def _schema(op: str) -> tuple[_Argument, ...] | None:
    namespace, _, rest = op.partition(".")
    name, _, overload = rest.partition(".")
    found = getattr(getattr(torch.ops.aten, name, None), overload or "default", None) if namespace == "aten" else None
    if found is None:
        return None
    return tuple(
        _Argument(
            a.name, a.has_default_value(), _default(a.default_value) if a.has_default_value() else None, a.kwarg_only
        )
        for a in found._schema.arguments
    )


def is_known(op: str) -> bool:
    """Say whether an ATen operator of this name exists here."""
    return _schema(op) is not None


def arguments(step: Call) -> dict[str, Arg]:
    """Return every argument of an ATen call by its schema name, defaults filled in."""
    schema = _schema(step.op)
    if schema is None:
        raise KeyError(step.op)
    found = {a.name: a.default for a in schema}
    found.update(
        {a.name: given for a, given in zip((a for a in schema if not a.keyword_only), step.args, strict=False)}
    )
    found.update(step.kwargs)
    return found


def _equal(a: Arg, b: Arg) -> bool:
    return type(a) is type(b) and a == b


def call(op: str, given: Mapping[str, Arg], results: tuple[str | None, ...]) -> Call:
    """Return the call with these arguments: positional up to the last that differs from its default.

    Keyword-only arguments follow by name where they differ from theirs.
    """
    schema = _schema(op)
    if schema is None:
        raise KeyError(op)
    positional = [a for a in schema if not a.keyword_only]
    while positional and positional[-1].has_default and _equal(given.get(positional[-1].name), positional[-1].default):
        positional.pop()
    keywords = [
        (a.name, given.get(a.name))
        for a in schema
        if a.keyword_only and not (a.has_default and _equal(given.get(a.name), a.default))
    ]
    return Call(op, tuple(given.get(a.name) for a in positional), tuple(sorted(keywords)), results)
