"""Small questions that the recognising passes ask about a graph."""

from tune_model.extract.algebra import same
from tune_model.extract.layout import arg_dim
from tune_model.extract.rewrite.graph import Graph
from tune_model.runtime.expression import Dim
from tune_model.runtime.program import Arg, Call, Items, Ref

__all__ = ["is_vector", "normalized_shape", "number", "over_last_dim", "pairs", "square_of", "stabilised", "uncast"]


def number(arg: Arg) -> float | None:
    """Return a finite number argument."""
    return float(arg) if isinstance(arg, int | float) and not isinstance(arg, bool) else None


def pairs(step: Call) -> tuple[tuple[str, str], ...]:
    """Return the two tensors of a commutative call, in both orders; none when one is a number."""
    if len(step.args) < 2:
        return ()
    a, b = step.args[0], step.args[1]
    if not (isinstance(a, Ref) and isinstance(b, Ref)):
        return ()
    return ((a.name, b.name), (b.name, a.name))


def over_last_dim(graph: Graph, arg: Arg, op: str) -> str | None:
    """Return what is reduced when `arg` is `op` over the last dim, kept as 1."""
    step = graph.made_by(arg, op)
    if step is None or len(step.args) < 3 or step.args[2] is not True or not isinstance(step.args[0], Ref):
        return None
    source = step.args[0].name
    last = len(graph.type(source).shape) - 1
    dims = step.args[1]
    chosen = dims.items if isinstance(dims, Items) else (dims,)
    return source if chosen == (last,) else None


def square_of(graph: Graph, name: str) -> str | None:
    """Return x when `name` is x squared."""
    step = graph.made_by(Ref(name), "aten.pow.Tensor_Scalar", "aten.mul.Tensor")
    if step is None or not isinstance(step.args[0], Ref):
        return None
    squared = step.args[1] == 2 if step.op.startswith("aten.pow") else step.args[1] == step.args[0]
    return step.args[0].name if squared else None


def _plus_eps(graph: Graph, arg: Arg) -> tuple[str, float] | None:
    step = graph.made_by(arg, "aten.add.Scalar")
    if step is None or len(step.args) != 2 or not isinstance(step.args[0], Ref):
        return None
    eps = number(step.args[1])
    return None if eps is None else (step.args[0].name, eps)


def stabilised(graph: Graph, root: Call) -> list[tuple[str, str, float]]:
    """Return every reading of `root` as x / sqrt(v + eps): (x, v, eps).

    Spelled as a product with `rsqrt`, with a power of -0.5 or with a reciprocal root, or as a quotient.
    """
    found: list[tuple[str, str, float]] = []
    if root.op == "aten.div.Tensor" and isinstance(root.args[0], Ref):
        inner = _plus_eps(graph, _argument(graph.made_by(root.args[1], "aten.sqrt.default")))
        return [] if inner is None else [(root.args[0].name, *inner)]
    if root.op != "aten.mul.Tensor":
        return []
    for x, r in pairs(root):
        scale = graph.made_by(Ref(r), "aten.rsqrt.default", "aten.pow.Tensor_Scalar", "aten.reciprocal.default")
        if scale is None:
            continue
        inside = _argument(scale)
        if scale.op == "aten.reciprocal.default":
            inside = _argument(graph.made_by(inside, "aten.sqrt.default"))
        elif scale.op == "aten.pow.Tensor_Scalar" and scale.args[1] != -0.5:
            continue
        inner = _plus_eps(graph, inside)
        if inner is not None:
            found.append((x, *inner))
    return found


def _argument(step: Call | None) -> Arg:
    return None if step is None else step.args[0]


def uncast(graph: Graph, name: str) -> str:
    """Return what `name` is a cast of, or `name`."""
    step = graph.made_by(Ref(name), "aten.to.dtype")
    return step.args[0].name if step is not None and isinstance(step.args[0], Ref) else name


def is_vector(graph: Graph, name: str, size: Dim) -> bool:
    """Say whether a value has one dim, of this size."""
    shape = graph.type(name).shape
    return len(shape) == 1 and same(shape[0], size)


def normalized_shape(arg: Arg) -> tuple[Dim, ...]:
    """Return the `normalized_shape` argument of a norm."""
    return tuple(arg_dim(a) for a in arg.items) if isinstance(arg, Items) else ()
