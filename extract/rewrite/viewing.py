"""Adding views of values, after a row-major copy where a value does not lie so that it can be viewed."""

from tune_model.extract.layout import make_type, view
from tune_model.extract.rewrite.graph import Graph
from tune_model.extract.rewrite.spelling import CONTIGUOUS
from tune_model.runtime.program import Arg, Call, Ref

__all__ = ["add_copy", "add_view"]


def add_view(graph: Graph, index: int, op: str, source: str, *args: Arg) -> str:
    """Insert one of the four view calls on `source` before step `index`; returns its value.

    Raises:
        ValueError: It fits no layout of the source.
    """
    call = Call(op, (Ref(source), *args))
    found = view(call, graph.type(source))
    if found is None:
        call = Call(op, (Ref(add_copy(graph, index, source)), *args))
        found = view(call, make_type(graph.type(source).dtype, graph.type(source).shape))
    if found is None:
        raise ValueError(f"{op} of a row-major {source} cannot be a view")
    return graph.add(index, call, found.type, source)


def add_copy(graph: Graph, index: int, source: str) -> str:
    """Insert a row-major copy of `source` before step `index`; returns its value."""
    type_ = graph.type(source)
    call = Call("aten.clone.default", (Ref(source),), CONTIGUOUS)
    return graph.add(index, call, make_type(type_.dtype, type_.shape), source)
