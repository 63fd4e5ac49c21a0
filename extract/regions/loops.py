"""The loops of a region in canonical order, neighbours joined: a linear over (batch, sequence) has one row loop.

Loops are ordered as memory runs through the widest result, the reduced ones last. Two neighbours are joined when every
value runs over both or neither and every operand has them back to back in memory.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from tune_model.extract.algebra import Polynomial, polynomial
from tune_model.extract.layout import magnitude, strides_of
from tune_model.extract.regions.axes import Axes, Misfit, tensor_refs
from tune_model.extract.regions.vocabulary import OpClass, classify
from tune_model.runtime.program import Call, TensorType

__all__ = ["Loops", "Track", "find_loops"]

ONE = polynomial(1)
ZERO = polynomial(0)


class Track(NamedTuple):
    """How one value runs over one loop: over how many elements, and how far apart (operands and results)."""

    size: Polynomial
    stride: Polynomial


class Loops:
    """The loops of a region.

    Attributes:
        count: How many there are; a matmul's sum is not among them.
        reduced: Which of them are reduced: the last ones.
    """

    def __init__(self, axes: Axes, types: Mapping[str, TensorType], groups: tuple[tuple[int, ...], ...]) -> None:
        self._axes = axes
        self._types = types
        self._group = {place: i for i, places in enumerate(groups) for place in places}
        self._inner = {places[-1] for places in groups if places}
        self.count = len(groups)
        places = {axes.place(a) for a in _atoms(axes) if a in axes.reduced}
        self.reduced = tuple(i for i, group in enumerate(groups) if places & set(group))

    def index(self, axis: int) -> int | None:
        """Return which loop an axis belongs to; `None` for a matmul's sum."""
        return self._group.get(self._axes.place(axis))

    def tracks(self, name: str) -> list[Track | None]:
        """Return how a value runs over each loop; `None` where it does not."""
        found: list[Track | None] = [None] * self.count
        for axis, stride in places_of(self._axes, self._types, name):
            at = self.index(axis)
            if at is None:
                continue
            known = found[at]
            size = self._axes.size(axis) * (ONE if known is None else known.size)
            is_inner = known is None or self._axes.place(axis) in self._inner
            found[at] = Track(size, stride if is_inner or known is None else known.stride)
        return found


def _atoms(axes: Axes) -> set[int]:
    return {a for name in axes.values for d in axes.dims(name) for a in d}


def places_of(axes: Axes, types: Mapping[str, TensorType], name: str) -> list[tuple[int, Polynomial]]:
    """Return a value's axes with their strides, innermost axis of each dim first."""
    found: list[tuple[int, Polynomial]] = []
    type_ = types[name]
    for dim, stride in zip(axes.dims(name), strides_of(type_), strict=True):
        run = polynomial(stride)
        for axis in reversed(dim):
            found.append((axis, run))
            run *= axes.size(axis)
    return found


def _in_memory_order(axes: Axes, types: Mapping[str, TensorType], name: str) -> list[int]:
    """Return the places of a value, outermost in memory first; broadcast ones stay where they are among the dims."""
    found = places_of(axes, types, name)
    if any(stride == ZERO for _, stride in found):
        return [axes.place(a) for d in axes.dims(name) for a in d]
    position = {a: i for i, a in enumerate(a for d in axes.dims(name) for a in d)}
    ranked = sorted(found, key=lambda f: (-magnitude(f[1].dim), position[f[0]]))
    return [axes.place(a) for a, _ in ranked]


def _order(
    axes: Axes, types: Mapping[str, TensorType], calls: Sequence[Call], results: Sequence[str], operands: Sequence[str]
) -> list[int]:
    """Return the places of a region without a matmul in loop order."""
    made = [r for c in calls for r in c.results if r is not None]
    tables = {tensor_refs(c.args[:1])[0] for c in calls if classify(c) is OpClass.LOOKUP}
    widest = max([*results, *made, *(n for n in operands if n not in tables)], key=lambda n: len(axes.places(n)))
    order = _in_memory_order(axes, types, widest)
    reduced = {axes.place(a) for a in _atoms(axes) if a in axes.reduced}
    return [p for p in order if p not in reduced] + [p for p in order if p in reduced]


def _joinable(axes: Axes, types: Mapping[str, TensorType], outer: int, inner: int, operands: Sequence[str]) -> bool:
    for name in axes.values:
        places = axes.places(name)
        if (outer in places) != (inner in places):
            return False
    for name in operands:
        strides = {axes.place(a): (s, axes.size(a)) for a, s in places_of(axes, types, name)}
        if outer in strides and strides[outer][0] != strides[inner][0] * strides[inner][1]:
            return False
    return True


def _plain(axes: Axes) -> set[int]:
    """Return the places that one axis has for itself and that may be joined."""
    by_place: dict[int, set[int]] = {}
    for atom in _atoms(axes):
        by_place.setdefault(axes.place(atom), set()).add(atom)
    return {p for p, atoms in by_place.items() if len(atoms) == 1 and not any(axes.is_solid(a) for a in atoms)}


def find_loops(
    axes: Axes, types: Mapping[str, TensorType], calls: Sequence[Call], results: Sequence[str], operands: Sequence[str]
) -> Loops:
    """Return the loops of calls whose axes are known.

    Raises:
        Misfit: A value runs over a loop that the widest value does not have.
    """
    plain = _plain(axes)

    def joined(places: Sequence[int]) -> list[tuple[int, ...]]:
        groups: list[list[int]] = []
        for place in places:
            before = groups[-1][-1] if groups else None
            if {before, place} <= plain and before is not None and _joinable(axes, types, before, place, operands):
                groups[-1].append(place)
            else:
                groups.append([place])
        return [tuple(g) for g in groups]

    matmul = next((c for c in calls if classify(c) is OpClass.MATMUL), None)
    if matmul is None:
        groups = joined(_order(axes, types, calls, results, operands))
        covered = {p for g in groups for p in g}
    else:
        groups = _matmul_loops(axes, types, matmul, joined)
        covered = {p for g in groups for p in g} | {axes.place(a) for a in axes.dims(tensor_refs(matmul.args)[0])[-1]}
    covered |= {axes.place(a) for a in axes.table_rows}
    if any(axes.places(name) - covered for name in axes.values):
        raise Misfit("no value runs over all loops")
    return Loops(axes, types, tuple(groups))


def _matmul_loops(
    axes: Axes, types: Mapping[str, TensorType], matmul: Call, joined: Callable[[Sequence[int]], list[tuple[int, ...]]]
) -> list[tuple[int, ...]]:
    """Return the loops of a matmul: batches, rows, columns. Rows and columns are there even when there is only one."""
    name = matmul.results[0] or ""
    dims = axes.dims(name)
    columns = [axes.place(a) for a in dims[-1]]
    rows = [] if matmul.op == "aten.linear.default" else [axes.place(a) for a in dims[-2]]
    lead = [p for p in _in_memory_order(axes, types, name) if p not in {*rows, *columns}]
    groups = joined([*lead, *rows])
    if rows and not set(rows) <= set(groups[-1]):
        raise Misfit("rows that are no single loop")
    if not groups or (not rows and matmul.op != "aten.linear.default"):
        groups.append(())
    if len(columns) > 1:
        raise Misfit("columns that are no single loop")
    return [*groups, tuple(columns)]
