"""Products that add something scaled, `addmm` and `baddbmm`, as a product and pointwise work that can join it.

A vector added to a product with a weight stays: that is a linear layer's bias. `tune.families.aten_addition` puts the
two together again where the library does it best.
"""

from tune_model.extract.rewrite.graph import Graph
from tune_model.runtime.program import Arg, Call, Program, Ref

__all__ = ["take_additions_apart"]

_PRODUCTS = {"aten.addmm.default": "aten.mm.default", "aten.baddbmm.default": "aten.bmm.default"}


def take_additions_apart(program: Program) -> Program:
    """Replace `beta * c + alpha * a @ b` by the product, `c` scaled, and their sum.

    The product is rounded to its type before it is scaled, which the library does not; nothing where it adds integers.
    """
    graph = Graph(program)
    for index, step in enumerate(graph.steps):
        op = _PRODUCTS.get(step.op)
        result = step.results[0] if step.results else None
        if op is None or result is None or len(step.args) != 3 or not _is_plain(graph, step):
            continue
        added, left, right = step.args
        if not isinstance(added, Ref) or _is_bias(graph, step):
            continue
        given = dict(step.kwargs)
        alpha, beta = given.get("alpha", 1), given.get("beta", 1)
        product = Ref(graph.add(index, Call(op, (left, right)), graph.type(result), result))
        if beta == 0:  # then `added` is not read at all, be it NaN
            graph.change(index, Call("aten.mul.Scalar", (product, alpha), (), step.results))
            continue
        terms, factor = (added, product), alpha  # a sum has a factor for its second term
        if beta != 1:
            if alpha != 1:
                scaled = Call("aten.mul.Scalar", (product, alpha))
                product = Ref(graph.add(index, scaled, graph.type(result), result))
            terms, factor = (product, added), beta
        factors: tuple[tuple[str, Arg], ...] = () if factor == 1 else (("alpha", factor),)
        graph.change(index, Call("aten.add.Tensor", terms, factors, step.results))
    return graph.finish()


def _is_plain(graph: Graph, step: Call) -> bool:
    """Say whether the factors are numbers and everything is of one floating-point type."""
    tensors = [arg for arg in step.args if isinstance(arg, Ref)]
    dtypes = {graph.type(name.name).dtype for name in tensors}
    numbers = all(isinstance(value, int | float) for _, value in step.kwargs)
    return numbers and len(tensors) == 3 and len(dtypes) == 1 and dtypes.pop().startswith(("float", "bfloat"))


def _is_bias(graph: Graph, step: Call) -> bool:
    """Say whether it is the product of a linear layer with its bias."""
    added, _, right = step.args
    if step.op != "aten.addmm.default" or step.kwargs or not isinstance(added, Ref) or not isinstance(right, Ref):
        return False
    turned = graph.made_by(right, "aten.permute.default") is not None
    return len(graph.type(added.name).shape) == 1 and (turned or right.name in graph.weights)
