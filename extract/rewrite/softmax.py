"""exp(x - max(x)) / sum(exp(x - max(x))) in float32 becomes `aten.softmax`."""

from tune_model.extract.layout import make_type
from tune_model.extract.rewrite.graph import Graph
from tune_model.extract.rewrite.match import over_last_dim
from tune_model.runtime.program import Call, Program, Ref

__all__ = ["recognise_softmax"]


def recognise_softmax(program: Program) -> Program:
    """Replace spelled-out softmax over the last dim.

    In half precision every small step rounds and the operator would not, so only float32 is replaced.
    """
    graph = Graph(program)
    for index, step in enumerate(graph.steps):
        x = _softmax_of(graph, step) if step.op == "aten.div.Tensor" and len(step.args) == 2 else None
        if x is None or graph.type(x).dtype != "float32":
            continue
        last = len(graph.type(x).shape) - 1
        graph.change(index, Call("aten.softmax.int", (Ref(x), last), (), step.results))
        result = step.results[0]
        if result is not None:
            graph.retype(result, make_type("float32", graph.type(result).shape))
    return graph.finish()


def _softmax_of(graph: Graph, quotient: Call) -> str | None:
    weights = quotient.args[0]
    exponential = graph.made_by(weights, "aten.exp.default")
    if exponential is None or not isinstance(weights, Ref):
        return None
    if over_last_dim(graph, quotient.args[1], "aten.sum.dim_IntList") != weights.name:
        return None
    shifted = graph.made_by(exponential.args[0], "aten.sub.Tensor")
    if shifted is None or len(shifted.args) != 2 or not isinstance(shifted.args[0], Ref):
        return None
    x = shifted.args[0].name
    return x if over_last_dim(graph, shifted.args[1], "aten.amax.default") == x else None
