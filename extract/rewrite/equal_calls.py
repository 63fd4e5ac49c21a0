"""Equal calls once: models compute casts, differences and views of the same value several times."""

from tune_model.extract.layout import VIEWS
from tune_model.extract.rewrite.graph import Graph, map_refs, refs
from tune_model.runtime.program import Program

__all__ = ["share_common_calls"]

_RANDOM = ("rand", "dropout", "bernoulli", "multinomial", "normal", "exponential", "empty")


def share_common_calls(program: Program) -> Program:
    """Let readers of a call's result read the first equal call's result.

    Only ATen calls, and none that reads a cache: it changes between equal calls.
    """
    graph = Graph(program)
    first: dict[str, str] = {}
    caches = {i.name for i in program.inputs if i.role == "cache"}
    for step in graph.steps:
        if not step.op.startswith("aten.") or len(step.results) != 1 or step.results[0] is None:
            continue
        if any(word in step.op for word in _RANDOM):
            continue
        if caches.intersection(refs(step)):
            if step.op in VIEWS:
                caches.add(step.results[0])
            continue
        resolved = map_refs(step, graph.resolve)
        key = repr((resolved.op, resolved.args, resolved.kwargs))
        known = first.setdefault(key, step.results[0])
        if known != step.results[0]:
            graph.replace(step.results[0], known)
    return graph.finish()
