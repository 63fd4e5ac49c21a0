"""Heads that lie side by side and are treated alike are treated together.

After their projections are merged, queries and keys are neighbours in one tensor, and both are rotated by the same
angles: one rotary embedding over all of their heads does the work of two.
"""

from collections.abc import Iterator
from itertools import combinations
from typing import NamedTuple

from tune_model.extract.algebra import polynomial, same_all
from tune_model.extract.layout import dim_arg, in_order_of, is_row_major, make_type, size_args, view
from tune_model.extract.regions.vocabulary import OpClass, classify
from tune_model.extract.rewrite.graph import Graph, map_refs, refs
from tune_model.extract.rewrite.relayout import relayout
from tune_model.runtime.expression import Dim
from tune_model.runtime.program import Call, Items, Program, Ref, TensorType

__all__ = ["join_heads"]


class _Heads(NamedTuple):
    """A value of some heads: columns `start` to `end` of `source`, cut into (heads, depth) and permuted by `order`."""

    value: str
    source: str
    start: int
    end: int
    split: tuple[Dim, ...]
    order: tuple[int, ...]

    @property
    def axis(self) -> int:
        """The dim that counts heads."""
        return self.order.index(len(self.order) - 2)


class _Pair(NamedTuple):
    """Two steps that do the same to different heads."""

    first: int
    second: int


def join_heads(program: Program) -> Program:
    """Do pointwise work on neighbouring heads once, for every two that are treated alike."""
    graph = Graph(program)
    by_source: dict[str, list[_Heads]] = {}
    for heads in _all_heads(graph):
        by_source.setdefault(heads.source, []).append(heads)
    used: set[str] = set()
    for a, b in (pair for heads in by_source.values() for pair in combinations(heads, 2)):
        first, second = (a, b) if a.start < b.start else (b, a)
        if {a.value, b.value} & used or not _are_neighbours(first, second):
            continue
        pairs, values = _in_step(graph, first, second)
        if any(classify(graph.steps[p.first]) is OpClass.POINTWISE for p in pairs):
            _join(graph, first, second, pairs, values)
            used |= {a.value, b.value}
    return relayout(graph.finish())


def _all_heads(graph: Graph) -> Iterator[_Heads]:
    for step in graph.steps:
        if step.op != "aten.permute.default" or step.results[0] is None or not isinstance(step.args[1], Items):
            continue
        split = graph.made_by(step.args[0], "aten.view.default")
        cut = None if split is None else graph.made_by(split.args[0], "aten.slice.Tensor")
        if split is None or cut is None or len(cut.args) != 4 or not isinstance(cut.args[0], Ref):
            continue
        source, dim, start, end = cut.args
        shape = graph.type(split.results[0] or "").shape
        columns = graph.type(cut.results[0] or "").shape
        if not isinstance(start, int) or not isinstance(end, int) or dim != len(columns) - 1:
            continue
        if len(shape) == len(columns) + 1 and same_all(shape[:-2], columns[:-1]) and isinstance(source, Ref):
            order = tuple(int(a) for a in step.args[1].items if isinstance(a, int))
            yield _Heads(step.results[0], source.name, start, end, shape, order)


def _are_neighbours(a: _Heads, b: _Heads) -> bool:
    if a.source != b.source or a.end != b.start or a.order != b.order or len(a.split) != len(b.split):
        return False
    return same_all((*a.split[:-2], a.split[-1]), (*b.split[:-2], b.split[-1]))


def _in_step(graph: Graph, a: _Heads, b: _Heads) -> tuple[list[_Pair], dict[str, str]]:
    """Walk the readers of both values in step; returns the pairs of steps and of values that correspond."""
    values = {a.value: b.value}
    pairs: list[_Pair] = []
    pending = [a.value]
    seen: set[int] = set()
    while pending:
        name = pending.pop(0)
        for index in graph.readers.get(name, ()):
            if index < 0 or index in seen or not _keeps_heads(graph, graph.steps[index], a.axis, values):
                continue
            other = _counterpart(graph, graph.steps[index], name, values)
            if other is None:
                continue
            seen.add(index)
            first, second = graph.steps[index].results[0], graph.steps[other].results[0]
            if first is not None and second is not None:
                pairs.append(_Pair(index, other))
                values[first] = second
                # A step with two operands of the pair is tried again when the other is known.
                pending += [first, *values]
    return sorted(set(pairs)), values


def _keeps_heads(graph: Graph, step: Call, axis: int, values: dict[str, str]) -> bool:
    """Say whether a step treats every head alike: pointwise, or cutting and joining other dims."""
    kind = classify(step)
    rank = len(graph.type(step.results[0]).shape) if step.results and step.results[0] is not None else 0
    if kind in {OpClass.VIEW, OpClass.JOIN}:
        return step.op in {"aten.slice.Tensor", "aten.cat.default"} and len(step.args) > 1 and step.args[1] != axis
    if kind is not OpClass.POINTWISE:
        return False
    for name in refs(step):
        shape = graph.type(name).shape
        at = axis - (rank - len(shape))
        if name not in values and at >= 0 and shape[at] != 1:
            return False
        if name in values and len(shape) != rank:
            return False
    return True


def _counterpart(graph: Graph, step: Call, name: str, values: dict[str, str]) -> int | None:
    """Return the step that does to the second value's heads what `step` does to the first's."""
    wanted = map_refs(step, lambda n: values.get(n, n))
    for index in graph.readers.get(values[name], ()):
        if index >= 0:
            other = graph.steps[index]
            if (other.op, other.args, other.kwargs) == (wanted.op, wanted.args, wanted.kwargs):
                return index
    return None


def _join(graph: Graph, a: _Heads, b: _Heads, pairs: list[_Pair], values: dict[str, str]) -> None:
    counts = [polynomial(h.split[-2]) for h in (a, b)]
    joined = {a.value: _all_columns(graph, min(pairs[0]), a, b)}
    made_at: dict[str, int] = {}
    for pair in pairs:
        step = graph.steps[pair.first]
        result = step.results[0] or ""
        call = map_refs(step, lambda n: joined.get(n, n))
        like = graph.type(result)
        shape = (*like.shape[: a.axis], (counts[0] + counts[1]).dim, *like.shape[a.axis + 1 :])
        # Where the first of both stands: what they share is there, and what they do not share is joined earlier.
        made_at[result] = min(pair)
        joined[result] = graph.add(min(pair), call, _made(graph, call, like, shape), result)
    walked = {i for p in pairs for i in p}
    for first, whole in joined.items():
        second = values[first]
        readers = {*graph.readers.get(first, ()), *graph.readers.get(second, ())}
        if first == a.value or readers <= walked:
            continue
        edges = (polynomial(0), counts[0], counts[0] + counts[1])
        for name, start, end in ((first, edges[0], edges[1]), (second, edges[1], edges[2])):
            cut = Call("aten.slice.Tensor", (Ref(whole), a.axis, dim_arg(start.dim), dim_arg(end.dim)))
            graph.replace(name, graph.add(made_at[first], cut, _viewed(graph, cut), name))


def _all_columns(graph: Graph, at: int, a: _Heads, b: _Heads) -> str:
    rank = len(graph.type(a.source).shape)
    cut = Call("aten.slice.Tensor", (Ref(a.source), rank - 1, a.start, b.end))
    columns = graph.add(at, cut, _viewed(graph, cut), a.value)
    heads = (polynomial(a.split[-2]) + polynomial(b.split[-2])).dim
    split = Call("aten.view.default", (Ref(columns), size_args((*a.split[:-2], heads, a.split[-1]))))
    value = graph.add(at, split, _viewed(graph, split), a.value)
    turn = Call("aten.permute.default", (Ref(value), Items(a.order)))
    return graph.add(at, turn, _viewed(graph, turn), a.value)


def _viewed(graph: Graph, call: Call) -> TensorType:
    found = view(call, graph.type(refs(call)[0]))
    if found is None:
        raise ValueError(f"{call.op} of heads cannot be a view")
    return found.type


def _made(graph: Graph, call: Call, like: TensorType, shape: tuple[Dim, ...]) -> TensorType:
    if classify(call) is OpClass.VIEW:
        return _viewed(graph, call)
    row_major = make_type(like.dtype, shape)
    return row_major if is_row_major(like) else in_order_of(row_major, like) or row_major
