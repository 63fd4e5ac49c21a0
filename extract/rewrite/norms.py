"""RMSNorm and LayerNorm spelled out in small operators become `aten.rms_norm` and `aten.layer_norm`.

Only the float32 core is recognised, then what surrounds it is absorbed one step at a time, each step exact: the
operators compute in float32 and round once at the end. So the spellings of transformers' models come out as

1. `w * (normalised in float32).to(bf16)`          -> `mul(rms_norm(x, None), w)`: both roundings stay
2. `(w.float() * normalised in float32).to(bf16)`  -> `rms_norm(x, w)`: one rounding
3. `(1 + w.float()) * ...`, cast at the end        -> `to(rms_norm(to(x), 1 + to(w)))`: such a weight has no bf16 value
4. `pow(mean + eps, -0.5)`, `x / sqrt(mean + eps)` -> as above
5. gated before or after                           -> as above; the gate stays pointwise

A float32 model has no casts, and every spelling becomes the operator with its weight.
"""

from tune_model.extract.layout import make_type, size_args
from tune_model.extract.rewrite.graph import Graph
from tune_model.extract.rewrite.match import is_vector, over_last_dim, pairs, square_of, stabilised, uncast
from tune_model.runtime.program import Arg, Call, Program, Ref, TensorType, TorchName

__all__ = ["absorb_norm_casts", "absorb_norm_weights", "recognise_norms"]

_NORMS = ("aten.rms_norm.default", "aten.layer_norm.default")
_HALF = frozenset({"bfloat16", "float16"})
_LAYER_NORM_EPS = 1e-05


def recognise_norms(program: Program) -> Program:
    """Replace the float32 cores: x / sqrt(mean(x^2) + eps) and (x - mean(x)) / sqrt(var(x) + eps)."""
    graph = Graph(program)
    for index, step in enumerate(graph.steps):
        for scaled, variance, eps in stabilised(graph, step):
            found = _layer(graph, scaled, variance, eps) or _rms(graph, scaled, variance, eps)
            result = step.results[0]
            if found is None or result is None or graph.type(result).dtype != "float32":
                continue
            graph.change(index, Call(found.op, found.args, (), step.results))
            graph.retype(result, make_type("float32", graph.type(result).shape))
            break
    return graph.finish()


def _rms(graph: Graph, scaled: str, variance: str, eps: float) -> Call | None:
    squares = over_last_dim(graph, Ref(variance), "aten.mean.dim")
    x = None if squares is None else square_of(graph, squares)
    if x is None or graph.type(x).dtype != "float32":
        return None
    if scaled not in {x, uncast(graph, x)}:
        return None
    return Call("aten.rms_norm.default", (Ref(x), size_args(graph.type(x).shape[-1:]), None, eps))


def _layer(graph: Graph, scaled: str, variance: str, eps: float) -> Call | None:
    centred = graph.made_by(Ref(scaled), "aten.sub.Tensor")
    if centred is None or len(centred.args) != 2 or not isinstance(centred.args[0], Ref):
        return None
    x = centred.args[0].name
    if over_last_dim(graph, centred.args[1], "aten.mean.dim") != x or graph.type(x).dtype != "float32":
        return None
    squares = over_last_dim(graph, Ref(variance), "aten.mean.dim")
    if squares is not None:
        if square_of(graph, squares) != scaled:
            return None
    elif not _is_population_variance(graph, variance, x):
        return None
    return _layer_norm(graph, x, None, None, eps)


def _is_population_variance(graph: Graph, name: str, x: str) -> bool:
    step = graph.made_by(Ref(name), "aten.var.correction")
    if step is None or step.args[0] != Ref(x):
        return False
    last = len(graph.type(x).shape) - 1
    keywords = dict(step.kwargs)
    return step.args[1] == size_args((last,)) and keywords.get("correction") == 0 and keywords.get("keepdim") is True


def _layer_norm(graph: Graph, x: str, weight: str | None, bias: str | None, eps: float) -> Call:
    given: list[Arg] = [Ref(x), size_args(graph.type(x).shape[-1:])]
    given += [None if v is None else Ref(v) for v in (weight, bias)]
    given.append(eps)
    if eps == _LAYER_NORM_EPS:
        given.pop()
    while len(given) > 2 and given[-1] is None:
        given.pop()
    return Call("aten.layer_norm.default", tuple(given))


def _arguments(step: Call) -> list[Arg]:
    """Return x, shape, weight, (bias,) eps of a norm, written out."""
    given = list(step.args)
    if step.op == "aten.rms_norm.default":
        return [*given, *[None] * (4 - len(given))]
    given += [None] * (4 - len(given))
    return given if len(given) == 5 else [*given, _LAYER_NORM_EPS]


def _with(graph: Graph, step: Call, at: int, value: str) -> Call:
    given = _arguments(step)
    given[at] = Ref(value)
    if step.op == "aten.rms_norm.default":
        return Call(step.op, tuple(given), (), step.results)
    x, _, weight, bias, eps = given
    names = [v.name if isinstance(v, Ref) else None for v in (weight, bias)]
    if not isinstance(x, Ref) or not isinstance(eps, float):
        raise TypeError(f"{step.op} with unexpected arguments")
    return Call(step.op, _layer_norm(graph, x.name, names[0], names[1], eps).args, (), step.results)


def absorb_norm_weights(program: Program) -> Program:
    """`norm(x) * w` becomes `norm(x, w)` and `layer_norm(x) + b` takes its bias, in float32."""
    graph = Graph(program)
    for index, step in enumerate(graph.steps):
        if step.op not in {"aten.mul.Tensor", "aten.add.Tensor"} or len(step.args) != 2 or step.results[0] is None:
            continue
        for value, vector in pairs(step):
            norm = graph.made_by(Ref(value), *_NORMS)
            if norm is None or not _may_take(graph, step, norm, value, vector):
                continue
            at = 2 if step.op == "aten.mul.Tensor" else 3
            graph.change(index, Call(norm.op, _with(graph, norm, at, vector).args, (), step.results))
            break
    return graph.finish()


def _may_take(graph: Graph, step: Call, norm: Call, value: str, vector: str) -> bool:
    given = _arguments(norm)
    free = given[2] is None and (norm.op == "aten.rms_norm.default" or given[3] is None)
    if step.op == "aten.add.Tensor":
        free = norm.op == "aten.layer_norm.default" and given[3] is None
    types = (graph.type(value), graph.type(vector))
    return (
        free
        and graph.read_once(value)
        and all(t.dtype == "float32" for t in types)
        and is_vector(graph, vector, types[0].shape[-1])
    )


def absorb_norm_casts(program: Program) -> Program:
    """`norm(x.float(), w.float()).to(half)` becomes `norm(x, w)`: the operator widens and rounds by itself."""
    graph = Graph(program)
    for index, step in enumerate(graph.steps):
        if step.op != "aten.to.dtype" or not isinstance(step.args[0], Ref):
            continue
        dtype = step.args[1].name if isinstance(step.args[1], TorchName) else ""
        norm = graph.made_by(step.args[0], *_NORMS)
        if norm is None or dtype not in _HALF or not graph.read_once(step.args[0].name):
            continue
        given = [
            Ref(uncast(graph, a.name)) if isinstance(a, Ref) and graph.type(a.name).dtype == "float32" else a
            for a in norm.args
        ]
        if all(graph.type(a.name).dtype == dtype for a in given if isinstance(a, Ref)):
            graph.change(index, Call(norm.op, tuple(given), (), step.results))
            result = step.results[0]
            if result is not None:
                graph.retype(result, TensorType(dtype, graph.type(result).shape))
    return graph.finish()
