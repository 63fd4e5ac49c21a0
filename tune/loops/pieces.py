"""Cutting an axis where the pieces of a concatenation meet, so that no element asks which piece it lies in.

A rotary embedding turns the halves of each head against each other. Over whole heads every element tests its half and
reads the other half's values under a mask, so a value is read three times and half of what is computed is thrown away.
Over half a head one index makes both results: each value is read once, nothing is masked, accesses stay wide.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Final

from tune_model.runtime.expression import Dim, product
from tune_model.tune.loops.graph import prune, renumber
from tune_model.tune.loops.ir import (
    Access,
    Axis,
    Bound,
    Constant,
    Index,
    Inside,
    Load,
    LoopNest,
    Node,
    Op,
    Reduce,
    Store,
)

__all__ = ["in_pieces"]

MOST_PIECES: Final = 4
"""Every piece is printed, and its values are held at the same time."""

LEAST_WIDTH: Final = 8
"""Elements of a piece: 16 bytes of half precision, the widest access."""

_JOINS: Final = {"sum": "add", "prod": "mul", "max": "maximum", "min": "minimum", "any": "or", "all": "and"}
"""The operation that makes a reduction over a row of the reductions over its pieces."""


def in_pieces(nest: LoopNest) -> LoopNest:
    """Return a nest that computes the same with the first axis that concatenations cut evenly run through in pieces."""
    for axis in range(len(nest.axes)):
        width = _width(nest, axis)
        if width:
            return _Cutter(nest, axis, width).cut()
    return nest


def _bounds(nodes: Iterable[Node]) -> Iterator[Bound]:
    for node in nodes:
        match node:
            case Load(where=where):
                yield from where
            case Inside(bound):
                yield bound
            case _:
                pass


def _width(nest: LoopNest, axis: int) -> int:
    """Return the length of the equal pieces that all cuts of an axis fall between; 0 where there are none."""
    size = nest.axes[axis].extent
    if not isinstance(size, int) or not _can_cut(nest, axis):
        return 0
    own = [b for b in _bounds(nest.nodes) if b.strides[axis] == 1 and _runs_along(b, axis)]
    cuts = {c for b in own for c in (b.low - b.offset, b.high - b.offset) if 0 < c < size}
    width = math.gcd(size, *cuts)
    return width if cuts and size <= MOST_PIECES * width and width % LEAST_WIDTH == 0 else 0


def _can_cut(nest: LoopNest, axis: int) -> bool:
    """Say whether every reduction over the axis can be made of reductions over its pieces."""
    if axis < len(nest.axes) - nest.inner:
        return True
    return nest.inner == 1 and all(n.kind in _JOINS for n in nest.nodes if isinstance(n, Reduce))


def _runs_along(bound: Bound, axis: int) -> bool:
    return not any(s for k, s in enumerate(bound.strides) if k != axis)


class _Cutter:
    """Writes every node once per piece; equal ones are one.

    Args:
        nest: What to cut.
        axis: Which axis.
        width: Length of a piece.
    """

    def __init__(self, nest: LoopNest, axis: int, width: int) -> None:
        self._nest = nest
        self._axis = axis
        self._width = width
        self._is_column = axis >= len(nest.axes) - nest.inner
        self._nodes: list[Node] = []
        self._known: dict[object, int] = {}
        self._starts = range(0, nest.axes[axis].size, width)
        self._at: list[list[int]] = [[] for _ in self._starts]

    def cut(self) -> LoopNest:
        nest = self._nest
        for node in nest.nodes:
            if isinstance(node, Reduce) and self._is_column:
                joined = self._joined(node)
                for at in self._at:
                    at.append(joined)
                continue
            for start, at in zip(self._starts, self._at, strict=True):
                at.append(self._moved(node, start, at))
        stores = tuple(self._stores())
        axes = (*nest.axes[: self._axis], Axis(self._width, self._width), *nest.axes[self._axis + 1 :])
        return prune(LoopNest(axes, nest.inner, tuple(self._nodes), stores, nest.requires))

    def _add(self, node: Node) -> int:
        # repr tells -0.0 from 0.0 and lets NaN equal itself.
        key = (node.dtype, repr(node.value)) if isinstance(node, Constant) else (type(node), node)
        if key not in self._known:
            self._known[key] = len(self._nodes)
            self._nodes.append(node)
        return self._known[key]

    def _joined(self, node: Reduce) -> int:
        parts = [self._add(Reduce(node.kind, at[node.value], node.dtype)) for at in self._at]
        total = parts[0]
        for part in parts[1:]:
            total = self._add(Op(_JOINS[node.kind], (total, part), node.dtype))
        return total

    def _moved(self, node: Node, start: int, at: Sequence[int]) -> int:
        """Write a node for the piece that begins at `start`; `at` says where what it reads is."""
        match node:
            case Load(access, dtype, where):
                tests = {bound: self._truth(bound, start) for bound in where}
                if False in tests.values():
                    return self._add(Constant(_zero(dtype), dtype))  # never chosen: outside, its value is not used
                left = tuple(self._shifted(bound, start) for bound, truth in tests.items() if truth is None)
                moved = Load(self._access(access, start), dtype, left, node.gather)
                return self._add(renumber(moved, at))
            case Index(strides, offset, dtype):
                return self._add(Index(strides, offset + strides[self._axis] * start, dtype))
            case Inside(bound):
                truth = self._truth(bound, start)
                return self._add(Inside(self._shifted(bound, start)) if truth is None else Constant(truth, "bool"))
            case Op("where", (condition, *choices)):
                chosen = self._nodes[at[condition]]
                if isinstance(chosen, Constant):
                    return at[choices[0 if chosen.value else 1]]
        return self._add(renumber(node, at))

    def _truth(self, bound: Bound, start: int) -> bool | None:
        """Return whether a bound holds, or fails, for a whole piece."""
        step = bound.strides[self._axis]
        if not _runs_along(bound, self._axis):
            return None
        ends = sorted((bound.offset + step * start, bound.offset + step * (start + self._width - 1)))
        if bound.low <= ends[0] and ends[1] < bound.high:
            return True
        return False if ends[1] < bound.low or ends[0] >= bound.high else None

    def _shifted(self, bound: Bound, start: int) -> Bound:
        return Bound(bound.strides, bound.offset + bound.strides[self._axis] * start, bound.low, bound.high)

    def _access(self, access: Access, start: int) -> Access:
        return Access(access.slot, access.strides, _sum(access.offset, product((access.strides[self._axis], start))))

    def _stores(self) -> Iterator[Store]:
        for store in self._nest.stores:
            pieces = zip(self._starts, self._at, strict=True)
            for start, at in pieces:
                yield Store(self._access(store.access, start), at[store.value])
                if store.access.strides[self._axis] == 0:
                    break  # one value for the whole axis


def _zero(dtype: str) -> bool | int | float:
    if dtype == "bool":
        return False
    return 0.0 if "float" in dtype else 0


def _sum(a: Dim, b: Dim) -> Dim:
    if isinstance(a, int) and isinstance(b, int):
        return a + b
    return b if a == 0 else a if b == 0 else f"{a} + {b}"
