"""Grouped-query attention: keys and values are no longer repeated to one per query head before attention.

Models write `k[:, :, None].expand(...).reshape(...)` or `repeat_interleave`, spelled alike by now.
"""

from tune_model.extract.algebra import same_all
from tune_model.extract.rewrite import schema
from tune_model.extract.rewrite.graph import Graph
from tune_model.runtime.expression import Dim, product
from tune_model.runtime.program import Arg, Call, Program, Ref

__all__ = ["SDPA", "recognise_grouped_queries"]

SDPA = "aten.scaled_dot_product_attention.default"


def recognise_grouped_queries(program: Program) -> Program:
    """Let attention read keys and values as they were before they were repeated."""
    graph = Graph(program)
    for index, step in enumerate(graph.steps):
        if step.op != SDPA:
            continue
        key, value = _before_repeat(graph, step.args[1]), _before_repeat(graph, step.args[2])
        if key is None or value is None or not _same_heads(graph, key, value):
            continue
        given = {**schema.arguments(step), "key": Ref(key), "value": Ref(value), "enable_gqa": True}
        graph.change(index, schema.call(SDPA, given, step.results))
    return graph.finish()


def _same_heads(graph: Graph, key: str, value: str) -> bool:
    return same_all(graph.type(key).shape[:2], graph.type(value).shape[:2])


def _source(step: Call | None) -> Arg:
    return None if step is None else step.args[0]


def _shape(graph: Graph, arg: Arg) -> tuple[Dim, ...]:
    return graph.type(arg.name).shape if isinstance(arg, Ref) else ()


def _before_repeat(graph: Graph, arg: Arg) -> str | None:
    """Return k[b, h, t, d] when `arg` is k with every head repeated in place."""
    joined = _source(graph.made_by(arg, "aten.view.default"))
    copied = _source(graph.made_by(joined, "aten.clone.default"))
    repeated = copied if copied is not None else joined
    split = _source(graph.made_by(repeated, "aten.expand.default"))
    k = _source(graph.made_by(split, "aten.view.default"))
    if not isinstance(k, Ref):
        return None
    before, wide, after = _shape(graph, k), _shape(graph, repeated), _shape(graph, arg)
    if len(before) != 4 or len(wide) != 5 or len(after) != 4:
        return None
    batch, heads, length, depth = before
    repeats = wide[2]
    right = same_all(_shape(graph, split), (batch, heads, 1, length, depth)) and same_all(
        wide, (batch, heads, repeats, length, depth)
    )
    return k.name if right and same_all(after, (batch, product((heads, repeats)), length, depth)) else None
