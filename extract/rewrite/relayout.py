"""Layouts after an edit: views follow what they are views of, and attention leaves its heads side by side."""

from tune_model.extract.layout import VIEWS, is_row_major, make_type, row_major, view
from tune_model.extract.rewrite.graph import Graph, refs
from tune_model.extract.rewrite.spelling import CONTIGUOUS
from tune_model.runtime.program import Call, Program, Ref

__all__ = ["lay_out_attention", "relayout"]

_ATTENTION = frozenset(
    {"aten.scaled_dot_product_attention.default", "tune_model.cached_attention", "tune_model.causal_attention"}
)


def relayout(program: Program) -> Program:
    """Bring the types of views up to date with what they are views of.

    A view that became impossible copies first; a copy that became pointless disappears.
    """
    graph = Graph(program)
    for index, step in enumerate(graph.steps):
        if step.op == "aten.clone.default" and step.kwargs == CONTIGUOUS and step.results[0] is not None:
            if is_row_major(graph.type(graph.resolve(refs(step)[0]))):
                graph.replace(step.results[0], refs(step)[0])
            continue
        if step.op not in VIEWS or step.results[0] is None:
            continue
        source = graph.resolve(refs(step)[0])
        found = view(step, graph.type(source))
        if found is None:
            before = graph.type(source)
            row_major = make_type(before.dtype, before.shape)
            copy = graph.add(index, Call("aten.clone.default", (Ref(source),), CONTIGUOUS), row_major, source)
            graph.change(index, Call(step.op, (Ref(copy), *step.args[1:]), (), step.results))
            found = view(step, graph.type(copy))
        if found is not None:
            graph.retype(step.results[0], found.type)
    return graph.finish()


def lay_out_attention(program: Program) -> Program:
    """Let attention write [batch, heads, length, depth] in the order batch, length, heads, depth.

    Joining the heads afterwards is then a view. Most kernels do so anyway; a form's result says it for all.
    """
    graph = Graph(program)
    for step in graph.steps:
        result = step.results[0] if step.op in _ATTENTION else None
        if result is None or len(graph.type(result).shape) != 4:
            continue
        batch, heads, length, depth = graph.type(result).shape
        b, t, h, d = row_major((batch, length, heads, depth))
        graph.retype(result, make_type(graph.type(result).dtype, (batch, heads, length, depth), (b, h, t, d)))
    return relayout(graph.finish())
