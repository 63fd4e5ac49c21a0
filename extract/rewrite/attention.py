"""What attention needs no separate pass for: copies of its operands into another order, and a scale of the queries."""

import math

from tune_model.extract.layout import VIEWS, strides_of
from tune_model.extract.rewrite import schema
from tune_model.extract.rewrite.graph import Graph
from tune_model.extract.rewrite.grouped_query import SDPA
from tune_model.runtime.program import Arg, Program, Ref

__all__ = ["fold_query_scales", "read_attention_operands_in_place"]


def read_attention_operands_in_place(program: Program) -> Program:
    """Let attention read transposed queries, keys and values where they are: its kernels take any strides but the last.

    Models copy them to row-major order first (`transpose(1, 2).contiguous()`).
    """
    graph = Graph(program)
    for index, step in enumerate(graph.steps):
        if step.op != SDPA:
            continue
        operands = tuple(_uncopied(graph, a) for a in step.args[:3])
        if operands != step.args[:3]:
            given = {**schema.arguments(step), **dict(zip(("query", "key", "value"), operands, strict=True))}
            graph.change(index, schema.call(SDPA, given, step.results))
    return graph.finish()


def _uncopied(graph: Graph, arg: Arg) -> Arg:
    copy = graph.made_by(arg, "aten.clone.default")
    source = None if copy is None else copy.args[0]
    if not isinstance(source, Ref) or strides_of(graph.type(source.name))[-1] != 1:
        return arg
    return source


def fold_query_scales(program: Program) -> Program:
    """attention(q * c, ..., scale=s) becomes attention(q, ..., scale=s*c) where that is exact.

    Multiplying by a power of two rounds nothing, so it may be done before or after the products are summed; in float32
    any other factor moves the last bit only.
    """
    graph = Graph(program)
    for index, step in enumerate(graph.steps):
        query = step.args[0] if step.op == SDPA else None
        scaled = _scaled(graph, query)
        if scaled is None or not isinstance(query, Ref):
            continue
        product, source, factor = scaled
        given = schema.arguments(step)
        scale, depth = given.get("scale"), graph.type(query.name).shape[-1]
        if scale is None and isinstance(depth, int):
            scale = 1.0 / math.sqrt(depth)
        if isinstance(scale, int | float):
            graph.replace(product, source)
            graph.change(index, schema.call(SDPA, {**given, "scale": float(scale * factor)}, step.results))
    return graph.finish()


def _scaled(graph: Graph, query: Arg) -> tuple[str, str, float] | None:
    """Return p, x and c when the queries are views of p = x * c and nothing else reads p."""
    step = None
    while isinstance(query, Ref) and graph.read_once(query.name):
        step = graph.made_by(query, *VIEWS, "aten.mul.Scalar")
        if step is None or step.op == "aten.mul.Scalar":
            break
        query = step.args[0]
    if step is None or step.op != "aten.mul.Scalar" or not isinstance(query, Ref):
        return None
    source, factor = step.args[:2]
    if not isinstance(source, Ref) or not isinstance(factor, int | float) or isinstance(factor, bool) or factor <= 0:
        return None
    type_ = graph.type(source.name)
    exact = math.frexp(factor)[0] == 0.5 or type_.dtype == "float32"
    return (query.name, source.name, float(factor)) if exact and type_ == graph.type(query.name) else None
