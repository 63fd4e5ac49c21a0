"""Layouts: views follow what they are views of, and what regions write lies in the order that suits its readers."""

from tune_model.extract.algebra import same_all
from tune_model.extract.layout import VIEWS, in_order_of, is_row_major, make_type, row_major, view
from tune_model.extract.regions.vocabulary import OpClass, classify
from tune_model.extract.rewrite.graph import READ_BY_CALLER, Graph, refs
from tune_model.extract.rewrite.spelling import CONTIGUOUS
from tune_model.runtime.program import Call, Program, Ref, TensorType

__all__ = ["relayout", "settle_layouts"]

_ATTENTION = frozenset(
    {"aten.scaled_dot_product_attention.default", "tune_model.cached_attention", "tune_model.causal_attention"}
)
_FOLLOWING = frozenset({OpClass.POINTWISE, OpClass.JOIN, OpClass.NORMALISE})


def relayout(program: Program) -> Program:
    """Bring the types of views up to date with what they are views of.

    A view that became impossible copies first; a copy that became pointless disappears.
    """
    graph = Graph(program)
    for index, step in enumerate(graph.steps):
        _follow(graph, index, step)
    return graph.finish()


def _follow(graph: Graph, index: int, step: Call) -> None:
    if len(step.results) != 1 or step.results[0] is None:
        return
    result = step.results[0]
    if step.op == "aten.clone.default" and step.kwargs == CONTIGUOUS:
        if is_row_major(graph.type(graph.resolve(refs(step)[0]))):
            graph.replace(result, refs(step)[0])
    elif step.op in VIEWS:
        source = graph.resolve(refs(step)[0])
        found = view(step, graph.type(source))
        if found is None:
            before = graph.type(source)
            row_major_type = make_type(before.dtype, before.shape)
            copy = graph.add(index, Call("aten.clone.default", step.args[:1], CONTIGUOUS), row_major_type, source)
            graph.change(index, Call(step.op, (Ref(copy), *step.args[1:]), (), step.results))
            found = view(step, graph.type(copy))
        if found is not None:
            graph.retype(result, found.type)


def settle_layouts(program: Program) -> Program:
    """Choose the order in memory of what regions write, where the trace's order came about by chance.

    - Attention writes [batch, heads, length, depth] in the order batch, length, heads, depth, so that joining the heads
      is a view. Most kernels do so anyway; a form's result says it for all.
    - A pointwise result follows the first operand of its size that is not row-major, as eager does when that comes
      first: rotary embeddings then read and write heads in one order however they are spelled.
    - One whose last dim would not be the innermost becomes row-major instead. Eager keeps the order, so a transpose
      before a residual stream (patches of an image, frames of sound) would go through the whole model, and every norm
      would read across rows.

    What the caller gets keeps the trace's order.
    """
    graph = Graph(program)
    for index, step in enumerate(graph.steps):
        _follow(graph, index, step)
        result = step.results[0] if len(step.results) == 1 else None
        if result is None or READ_BY_CALLER in graph.readers.get(result, ()):
            continue
        type_ = graph.type(result)
        if step.op in _ATTENTION and len(type_.shape) == 4:
            batch, heads, length, depth = type_.shape
            b, t, h, d = row_major((batch, length, heads, depth))
            graph.retype(result, make_type(type_.dtype, type_.shape, (b, h, t, d)))
        elif classify(step) in _FOLLOWING:
            graph.retype(result, _followed(graph, step, type_))
    return graph.finish()


def _followed(graph: Graph, step: Call, type_: TensorType) -> TensorType:
    """Return the type of a result in the order of its first operand that has one of its own."""
    for name in refs(step):
        operand = graph.type(graph.resolve(name))
        if len(operand.shape) != len(type_.shape) or is_row_major(operand):
            continue
        if classify(step) is OpClass.JOIN or same_all(operand.shape, type_.shape):
            found = in_order_of(type_, operand)
            if found is not None:
                return found
    return make_type(type_.dtype, type_.shape)
