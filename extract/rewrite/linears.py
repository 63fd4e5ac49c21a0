"""Linears that read the same input become one with concatenated weights, followed by slices of its output.

q, k and v; gate and up. One large matmul reads the input once and fills the machine better than several small ones. A
weight that anything else reads too (an embedding tied to the head) stays alone: it has one layout in the artifact.
"""

from collections import defaultdict
from itertools import pairwise
from typing import NamedTuple

from tune_model.extract.algebra import polynomial, tidy
from tune_model.extract.layout import make_type
from tune_model.extract.layout import view as view_of
from tune_model.extract.rewrite.graph import Graph, refs
from tune_model.extract.rewrite.relayout import relayout
from tune_model.runtime.program import Arg, Call, Concatenate, Items, Program, Ref, TensorType, Weight

__all__ = ["merge_linears", "spell_linears"]

LINEAR = "aten.linear.default"


class _Linear(NamedTuple):
    step: int
    x: str
    weight: str
    bias: str | None
    result: str


def spell_linears(program: Program) -> Program:
    """Write products of a matrix of rows with a weight as `aten.linear`, the weight turned by a view if need be."""
    graph = Graph(program)
    for index, step in enumerate(graph.steps):
        bias, factors = None, step.args
        if step.op == "aten.addmm.default" and len(step.args) == 3 and not step.kwargs:
            bias, factors = step.args[0], step.args[1:]
            if not isinstance(bias, Ref) or len(graph.type(bias.name).shape) != 1:
                continue
        elif step.op not in {"aten.mm.default", "aten.matmul.default"}:
            continue
        x, right = factors
        if not isinstance(x, Ref) or len(graph.type(x.name).shape) < 2:
            continue
        weight = _turned(graph, index, right)
        if weight is not None:
            given = (x, weight) if bias is None else (x, weight, bias)
            graph.change(index, Call(LINEAR, given, (), step.results))
    return graph.finish()


def _turned(graph: Graph, index: int, right: Arg) -> Ref | None:
    """Return the transpose of a product's right factor, if that is one already or a weight."""
    if not isinstance(right, Ref) or len(graph.type(right.name).shape) != 2:
        return None
    turned = graph.made_by(right, "aten.permute.default")
    if turned is not None and isinstance(turned.args[0], Ref):
        return turned.args[0]
    if right.name not in graph.weights:
        return None
    turn = Call("aten.permute.default", (right, Items((1, 0))))
    found = view_of(turn, graph.type(right.name))
    return None if found is None else Ref(graph.add(index, turn, found.type, right.name))


def merge_linears(program: Program) -> Program:
    """Merge every set of at least two linears with one input."""
    graph = Graph(program)
    by_input: dict[tuple[str, bool], list[_Linear]] = defaultdict(list)
    for index, step in enumerate(graph.steps):
        linear = _read(graph, index, step)
        if linear is not None:
            by_input[linear.x, linear.bias is not None].append(linear)
    for linears in by_input.values():
        for group in _groups(graph, linears):
            if len(group) > 1:
                _merge(graph, group)
    return relayout(graph.finish())


def _read(graph: Graph, index: int, step: Call) -> _Linear | None:
    if step.op != LINEAR or step.results[0] is None:
        return None
    given = [a.name if isinstance(a, Ref) else None for a in step.args]
    x, weight = given[:2]
    bias = given[2] if len(given) > 2 else None
    if x is None or weight is None:
        return None
    mine = [weight] if bias is None else [weight, bias]
    if not all(_is_free(graph, name) for name in mine):
        return None
    return _Linear(index, x, weight, bias, step.results[0])


def _is_free(graph: Graph, name: str) -> bool:
    weight = graph.weights.get(name)
    if weight is None or weight.transforms or len(weight.sources) != 1 or weight.type.strides is not None:
        return False
    return graph.readers.get(name, []) != [] and graph.read_once(name)


def _groups(graph: Graph, linears: list[_Linear]) -> list[list[_Linear]]:
    """Split linears with one input into those whose outputs meet in a product (gate and up), and the rest.

    So a block that feeds attention and a gated MLP from one norm keeps its gate and up halves together, where the
    product can join the matmul.
    """
    meeting: dict[int | None, list[_Linear]] = defaultdict(list)
    for linear in linears:
        meeting[_meets_at(graph, linear.result)].append(linear)
    rest = meeting.pop(None, [])
    groups = []
    for group in meeting.values():
        if len(group) > 1:
            groups.append(group)
        else:
            rest += group
    return [*groups, sorted(rest)]


def _meets_at(graph: Graph, name: str) -> int | None:
    """Follow a value through steps of one operand to the product that reads it."""
    while graph.read_once(name):
        index = graph.readers[name][0]
        step = graph.steps[index]
        operands = set(refs(step))
        if len(operands) == 2 and step.op == "aten.mul.Tensor":
            return index
        if len(operands) != 1 or len(step.results) != 1 or step.results[0] is None:
            return None
        name = step.results[0]
    return None


def _merge(graph: Graph, group: list[_Linear]) -> None:
    first = group[0]
    dtype = graph.type(first.weight).dtype
    sizes = [graph.type(one.weight).shape[0] for one in group]
    total = sum((polynomial(s) for s in sizes), start=polynomial(0))
    shape = graph.type(first.result).shape
    weight = _joined(graph, [one.weight for one in group], (total.dim, graph.type(first.weight).shape[1]), dtype)
    args = [Ref(first.x), Ref(weight)]
    biases = [one.bias for one in group if one.bias is not None]
    if biases:
        args.append(Ref(_joined(graph, biases, (total.dim,), dtype)))
    whole = make_type(graph.type(first.result).dtype, (*shape[:-1], total.dim))
    merged = graph.add(first.step, Call(LINEAR, tuple(args)), whole, first.result)
    edges = [polynomial(0)]
    for size in sizes:
        edges.append(edges[-1] + polynomial(size))
    for one, (start, end) in zip(group, pairwise(edges), strict=True):
        cut = Call("aten.slice.Tensor", (Ref(merged), len(shape) - 1, int(start.dim), int(end.dim)))
        found = view_of(cut, whole)
        if found is None:
            raise ValueError("a slice is always a view")
        graph.replace(one.result, graph.add(first.step, cut, found.type, one.result))


def _joined(graph: Graph, names: list[str], shape: tuple[int | str, ...], dtype: str) -> str:
    sources = tuple(graph.weights[n].sources[0] for n in names)
    name = _joint_name(names)
    graph.add_weight(Weight(name, TensorType(dtype, tuple(tidy(s) for s in shape)), sources, (Concatenate(0),)))
    return name


def _joint_name(names: list[str]) -> str:
    """`layers.0.attn.{q,k,v}.weight`: what the names have in common is said once."""
    parts = [n.split(".") for n in names]
    count = min(len(p) for p in parts)
    head = next((i for i in range(count) if len({p[i] for p in parts}) > 1), count)
    tail = next((i for i in range(count - head) if len({p[-1 - i] for p in parts}) > 1), count - head)
    middles = [".".join(p[head : len(p) - tail]) for p in parts]
    return ".".join([*parts[0][:head], "{" + ",".join(middles) + "}", *parts[0][len(parts[0]) - tail :]])
