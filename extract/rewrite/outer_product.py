"""A matmul over one element is an outer product: a broadcast multiplication.

Rotary angles are such a matmul (frequencies times positions). As a product it joins its neighbours in one pointwise
kernel, and torch 2.13 has no Triton kernel of its own to send it to on CUDA.
"""

from tune_model.extract.algebra import same_all
from tune_model.extract.layout import make_type
from tune_model.extract.rewrite.graph import Graph
from tune_model.runtime.expression import Dim
from tune_model.runtime.program import Call, Program, Ref

__all__ = ["rewrite_outer_products"]

_MATMULS = frozenset({"aten.matmul.default", "aten.bmm.default", "aten.mm.default"})


def rewrite_outer_products(program: Program) -> Program:
    """Replace matmuls of (..., m, 1) and (..., 1, n); the values are the same, since nothing is summed."""
    graph = Graph(program)
    for index, step in enumerate(graph.steps):
        if step.op not in _MATMULS or step.results[0] is None:
            continue
        a, b = step.args
        if not isinstance(a, Ref) or not isinstance(b, Ref):
            continue
        left, right = graph.type(a.name).shape, graph.type(b.name).shape
        if len(left) >= 2 and len(right) >= 2 and left[-1] == 1 and right[-2] == 1:
            result = step.results[0]
            shape = graph.type(result).shape
            a, b = _unexpanded(graph, a, right, shape), _unexpanded(graph, b, left, shape)
            graph.change(index, Call("aten.mul.Tensor", (a, b), (), step.results))
            graph.retype(result, make_type(graph.type(result).dtype, graph.type(result).shape))
    return graph.finish()


def _unexpanded(graph: Graph, operand: Ref, other: tuple[Dim, ...], shape: tuple[Dim, ...]) -> Ref:
    """Read what was expanded where the product broadcasts by itself: newer versions of these models do not expand."""
    expand = graph.made_by(operand, "aten.expand.default")
    source = None if expand is None else expand.args[0]
    if not isinstance(source, Ref):
        return operand
    own = graph.type(source.name).shape
    if len(own) != len(shape) or len(other) != len(shape):
        return operand
    broadcast = [b if a == 1 else a for a, b in zip(own, other, strict=True)]
    return source if same_all(broadcast, shape) else operand
