"""Layouts after an edit: views follow what they are views of, and attention leaves its heads side by side."""

from tune_model.extract.layout import VIEWS, is_row_major, make_type, row_major, view
from tune_model.extract.regions.vocabulary import OpClass, classify
from tune_model.extract.rewrite.graph import Graph, refs
from tune_model.extract.rewrite.spelling import CONTIGUOUS
from tune_model.runtime.program import Call, Program, Ref, TensorType

__all__ = ["relayout", "settle_layouts"]

_ATTENTION = frozenset(
    {"aten.scaled_dot_product_attention.default", "tune_model.cached_attention", "tune_model.causal_attention"}
)
_WRITTEN = frozenset({OpClass.POINTWISE, OpClass.COPY, OpClass.JOIN, OpClass.REDUCE, OpClass.NORMALISE})


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


def settle_layouts(program: Program) -> Program:
    """Choose the order in memory of what regions write, where the trace's order came about by chance.

    - Attention writes [batch, heads, length, depth] in the order batch, length, heads, depth, so that joining the heads
      is a view. Most kernels do so anyway; a form's result says it for all.
    - A pointwise result whose last dim is not the innermost becomes row-major. Eager lays it out like its first
      operand, so a transpose before a residual stream (patches of an image, frames of sound) would go through the whole
      model, and every norm would read across rows.
    """
    graph = Graph(program)
    for step in graph.steps:
        result = step.results[0] if len(step.results) == 1 else None
        if result is None:
            continue
        type_ = graph.type(result)
        if step.op in _ATTENTION and len(type_.shape) == 4:
            batch, heads, length, depth = type_.shape
            b, t, h, d = row_major((batch, length, heads, depth))
            graph.retype(result, make_type(type_.dtype, type_.shape, (b, h, t, d)))
        elif classify(step) in _WRITTEN and not _ends_innermost(type_):
            graph.retype(result, make_type(type_.dtype, type_.shape))
    return relayout(graph.finish())


def _ends_innermost(type_: TensorType) -> bool:
    return type_.strides is None or type_.shape[-1] == 1 or type_.strides[-1] == 1
