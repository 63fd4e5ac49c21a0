"""Which inputs of a program index a table or slots of a cache, and whether an index is past the end.

A kernel that looks up a row does not ask whether the table has it: it reads, or writes, other memory. So numbers that
come from outside are checked while they are on the host; nothing here waits for a device.
"""

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from tune_model.runtime.execution.executor import InputError
from tune_model.runtime.program import Apply, Call, Program, Ref, TensorType

__all__ = ["check_indices", "first_outside", "index_limits"]

_LOOKUPS = {"aten.embedding.default": (0, 0, 1), "tune_model.append_kv": (0, 2, 4)}
"""By operator: which argument is the table, which of its dims is indexed, and which argument holds the indices."""

_INTEGERS = frozenset({torch.int32, torch.int64})
_COPIES = frozenset({"aten._to_copy.default", "aten.to.dtype", "aten.clone.default", "aten.detach.default"})


def index_limits(program: Program) -> Mapping[str, int]:
    """Return, for each input that is looked up in a table or a cache, how many rows or slots that has.

    Inputs that only reach a lookup through arithmetic, and lookups that count negative indices from the end, are left
    out.
    """
    limits: dict[str, int] = {}
    types = {weight.name: weight.type for weight in program.weights}
    types |= {constant.name: constant.type for constant in program.constants}
    types |= {item.name: item.type for item in program.inputs}
    origin = {item.name: item.name for item in program.inputs if item.role == "user"}
    for step in program.steps:
        if isinstance(step, Call):
            _read((step,), types, origin, limits)
        else:
            _read_form(program, step, origin, limits)
    return limits


def _read_form(program: Program, step: Apply, origin: Mapping[str, str], limits: dict[str, int]) -> None:
    form = program.forms[step.form]
    types = {parameter.name: parameter.type for parameter in form.parameters}
    given = zip(form.parameters, step.inputs, strict=True)
    inside = {parameter.name: origin[value] for parameter, value in given if value in origin}
    if inside:
        _read(form.body, types, inside, limits)


def _read(
    calls: Iterable[Call], types: Mapping[str, TensorType], origin: dict[str, str], limits: dict[str, int]
) -> None:
    for call in calls:
        if call.op in _COPIES and call.results and call.results[0] is not None:
            copied = call.args[0]
            if isinstance(copied, Ref) and copied.name in origin:
                origin[call.results[0]] = origin[copied.name]
        if call.op not in _LOOKUPS:
            continue
        table_at, dim, indices_at = _LOOKUPS[call.op]
        if len(call.args) <= max(table_at, indices_at):
            continue
        table, indices = call.args[table_at], call.args[indices_at]
        if isinstance(table, Ref) and isinstance(indices, Ref) and table.name in types and indices.name in origin:
            size = types[table.name].shape[dim]
            if isinstance(size, int):
                name = origin[indices.name]
                limits[name] = min(limits.get(name, size), size)


def check_indices(inputs: Mapping[str, object], limits: Mapping[str, int]) -> None:
    """Check those of a call's inputs that lie on the host.

    Raises:
        InputError: An index is negative or past the end.
    """
    for name, limit in limits.items():
        given = inputs.get(name)
        if isinstance(given, Tensor) and given.device.type == "cpu" and given.dtype in _INTEGERS:
            found = first_outside(given, limit)
            if found is not None:
                place, value = found
                raise InputError(f"input {name!r} is {value} at {place}; expected 0 to {limit - 1}")


def first_outside(indices: Tensor, limit: int) -> tuple[list[int], int] | None:
    """Return where the first index below 0, or not below `limit`, is and its value; `None` when there is none.

    Args:
        indices: Integers, on the host.
        limit: Rows there are.
    """
    if indices.numel() == 0:
        return None
    low, high = indices.aminmax()
    if int(low) >= 0 and int(high) < limit:
        return None
    place: list[int] = ((indices < 0) | (indices >= limit)).nonzero()[0].tolist()
    return place, int(indices[tuple(place)])
