"""Drops arithmetic that changes nothing: times 1, divided by 1, plus or minus 0.

Rotary embeddings scale by an attention factor that is 1.0 in most models.
"""

from tune_model.extract.rewrite.graph import Graph
from tune_model.runtime.program import Program, Ref

__all__ = ["drop_unit_arithmetic"]

_NEUTRAL = {"aten.mul.Scalar": 1, "aten.div.Scalar": 1, "aten.add.Scalar": 0, "aten.sub.Scalar": 0}


def drop_unit_arithmetic(program: Program) -> Program:
    """Let readers of x*1 read x, where the dtype is the same."""
    graph = Graph(program)
    for step in graph.steps:
        if step.op not in _NEUTRAL or len(step.args) != 2 or step.results[0] is None:
            continue
        x, number = step.args
        if not isinstance(x, Ref) or isinstance(number, bool) or number != _NEUTRAL[step.op]:
            continue
        # x + 0 turns -0.0 into 0.0, which compares equal and differs in no later result but a division's sign.
        before, after = graph.type(x.name), graph.type(step.results[0])
        if before.dtype == after.dtype:
            graph.replace(step.results[0], x.name)
    return graph.finish()
