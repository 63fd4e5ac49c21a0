"""Pairs of reductions that one pass over the columns can make although the second needs the first's result.

The sum of exponentials above the row's largest value (softmax, logsumexp) and the sum of squares around the row's mean
(variance, layer norm): both can be kept for what was read so far and corrected when the first changes. Who prints loops
decides whether to use it; a row that is held whole needs no such thing.
"""

from collections.abc import Mapping, Sequence
from typing import Literal

import msgspec

from tune_model.tune.loops.ir import Constant, LoopNest, Node, Op, Reduce, arguments

__all__ = ["Pair", "find_pairs", "levels"]


class Pair(msgspec.Struct, frozen=True):
    """Two reductions over the same element.

    Attributes:
        kind: `exponentials`: the second sums exp(x - center), the first is the largest x. `squares`: the second sums
            (x - center) squared, the first sums x.
        first: Position of the first reduction.
        second: Position of the second.
        element: Position of x.
        center: Position of the row value that is subtracted.
        guarded: The center is 0 where the largest is infinite, so that a row of infinities has a result.
    """

    kind: Literal["exponentials", "squares"]
    first: int
    second: int
    element: int
    center: int
    guarded: bool = False


def find_pairs(nest: LoopNest) -> dict[int, Pair]:
    """Return the pairs of a nest by the position of their second reduction."""
    found = (_pair(nest.nodes, k, n) for k, n in enumerate(nest.nodes) if isinstance(n, Reduce) and n.kind == "sum")
    return {pair.second: pair for pair in found if pair is not None}


def levels(nest: LoopNest, pairs: Mapping[int, Pair]) -> list[int]:
    """Return for every node how many passes over the columns must be over before it is known.

    A pair's second reduction is known after the pass that makes the first.
    """
    found: list[int] = []
    for position, node in enumerate(nest.nodes):
        if position in pairs:
            found.append(found[pairs[position].first])
        else:
            known = max((found[a] for a in arguments(node)), default=0)
            found.append(known + isinstance(node, Reduce))
    return found


def _pair(nodes: Sequence[Node], position: int, reduce: Reduce) -> Pair | None:
    if reduce.dtype not in {"float32", "float64"}:
        return None
    term = nodes[reduce.value]
    if not isinstance(term, Op):
        return None
    if term.name == "exp":
        return _exponentials(nodes, position, term.args[0])
    if term.name == "mul" and term.args[0] == term.args[1]:
        return _squares(nodes, position, term.args[0])
    return None


def _difference(nodes: Sequence[Node], position: int) -> tuple[int, int] | None:
    node = nodes[position]
    return (node.args[0], node.args[1]) if isinstance(node, Op) and node.name == "sub" else None


def _exponentials(nodes: Sequence[Node], second: int, shifted: int) -> Pair | None:
    sides = _difference(nodes, shifted)
    if sides is None:
        return None
    element, center = sides
    first, guarded = center, False
    base = nodes[center]
    if isinstance(base, Op) and base.name == "where":
        test, zero = nodes[base.args[0]], nodes[base.args[1]]
        first, guarded = base.args[2], True
        if not (isinstance(test, Op) and test.name == "isinf" and test.args == (first,)):
            return None
        if not (isinstance(zero, Constant) and zero.value == 0):
            return None
    top = nodes[first]
    if isinstance(top, Reduce) and top.kind == "max" and top.value == element:
        return Pair("exponentials", first, second, element, center, guarded)
    return None


def _squares(nodes: Sequence[Node], second: int, gap: int) -> Pair | None:
    sides = _difference(nodes, gap)
    if sides is None:
        return None
    element, center = sides
    mean = nodes[center]
    if not (isinstance(mean, Op) and mean.name == "div" and isinstance(nodes[mean.args[1]], Constant)):
        return None
    total = nodes[mean.args[0]]
    if isinstance(total, Reduce) and total.kind == "sum" and total.value == element:
        return Pair("squares", mean.args[0], second, element, center)
    return None
