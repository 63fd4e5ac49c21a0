"""Attention that a model writes out, `softmax(q @ k.T * scale + mask) @ v`, becomes `scaled_dot_product_attention`.

MPNet, DeBERTa, BLOOM and most models written by hand do so, some with batch and heads folded into one dim around the
products. The scores then never reach memory.
"""

import math
from typing import NamedTuple

from tune_model.extract.algebra import same, same_all
from tune_model.extract.layout import make_type, size_args
from tune_model.extract.rewrite import schema
from tune_model.extract.rewrite.graph import READ_BY_CALLER, Graph
from tune_model.extract.rewrite.grouped_query import SDPA
from tune_model.extract.rewrite.match import number, pairs
from tune_model.extract.rewrite.viewing import add_view
from tune_model.runtime.expression import Dim, product
from tune_model.runtime.program import Arg, Call, Items, Program, Real, Ref, TorchName

__all__ = ["recognise_written_attention"]

_PRODUCTS = frozenset({"aten.matmul.default", "aten.bmm.default"})
_NEVER = -1e30
"""A finite number that is added or filled in to exclude a key is at most this."""


class _Scores(NamedTuple):
    """What a softmax is taken of.

    Attributes:
        query: [batch, heads, queries, depth], or with batch and heads folded into one dim.
        transposed_key: [batch, heads, depth, keys], or folded as the queries are.
        scale: Of the products.
        added: To the scaled products; each broadcasts to them.
        excluded: Where scores are replaced by a number, and the number.
        folded: How many of `added`, from the first, have batch and heads folded too.
    """

    query: str
    transposed_key: str
    scale: float
    added: tuple[str, ...] = ()
    excluded: tuple[tuple[str, float], ...] = ()
    folded: int = 0


def recognise_written_attention(program: Program) -> Program:
    """Replace attention over batches and heads whose scores nothing else reads.

    In half precision the operator keeps scores and weights in float32 where the model may round them.
    """
    graph = Graph(program)
    for index, step in enumerate(graph.steps):
        if step.op not in _PRODUCTS or step.results[0] is None:
            continue
        weights, value = step.args[:2]
        split = _split(graph, weights)
        scores = _weights_of(graph, weights if split is None else split)
        if scores is None or not isinstance(value, Ref):
            continue
        if split is None:
            if _fits(graph, scores, value.name):
                graph.change(index, _attention(graph, index, scores, value.name, step.results))
            continue
        heads = graph.type(split.name).shape[:2]
        unfolded = _unfolded(graph, index, scores, heads)
        if unfolded is None:
            continue
        values = _unfold(graph, index, value.name, heads)
        if values is not None and _fits(graph, unfolded, values):
            _put_back(graph, index, _attention(graph, index, unfolded, values, ()), heads)
    return graph.finish()


def _attention(graph: Graph, index: int, scores: _Scores, value: str, results: tuple[str | None, ...]) -> Call:
    given: dict[str, Arg] = {
        "query": Ref(scores.query),
        "key": Ref(add_view(graph, index, "aten.permute.default", scores.transposed_key, Items((0, 1, 3, 2)))),
        "value": Ref(value),
        "attn_mask": _mask(graph, index, scores),
        "dropout_p": 0.0,
        "is_causal": False,
        "scale": scores.scale,
        "enable_gqa": False,
    }
    return schema.call(SDPA, given, results)


# --------------------------------------------------------------------------------------------- batch and heads folded


def _split(graph: Graph, arg: Arg) -> Ref | None:
    """Return the four-dimensional value of which `arg` is a private view with the first two dims folded."""
    step = graph.made_by(arg, "aten.view.default")
    if step is None or not isinstance(arg, Ref) or not isinstance(step.args[0], Ref) or not graph.read_once(arg.name):
        return None
    shape, folded = graph.type(step.args[0].name).shape, graph.type(arg.name).shape
    fits = len(shape) == 4 and same_all((product(shape[:2]), *shape[2:]), folded)
    return step.args[0] if fits else None


def _unfold(graph: Graph, index: int, name: str, heads: tuple[Dim, ...]) -> str | None:
    """View a value of three dims with batch and heads apart; one that is the same for all of them, with ones."""
    first, *rest = graph.type(name).shape
    if len(rest) != 2 or not (first == 1 or same(first, product(heads))):
        return None
    apart = (1, 1) if first == 1 else heads
    return add_view(graph, index, "aten.view.default", name, size_args((*apart, *rest)))


def _unfolded(graph: Graph, index: int, scores: _Scores, heads: tuple[Dim, ...]) -> _Scores | None:
    terms = (scores.query, scores.transposed_key, *scores.added[: scores.folded])
    apart = [_unfold(graph, index, name, heads) for name in terms]
    if any(name is None for name in apart):
        return None
    query, key, *added = (str(name) for name in apart)
    return scores._replace(query=query, transposed_key=key, added=(*added, *scores.added[scores.folded :]), folded=0)


def _put_back(graph: Graph, index: int, attention: Call, heads: tuple[Dim, ...]) -> None:
    """Let attention stand for a folded product: those that unfold its result at once read it as it is."""
    step = graph.steps[index]
    result = str(step.results[0])
    type_ = graph.type(result)
    shape = (*heads, *type_.shape[1:])
    made = graph.add(index, attention, make_type(type_.dtype, shape), result)
    for reader in graph.readers.get(result, ()):
        unfolds = reader != READ_BY_CALLER and graph.steps[reader].op == "aten.view.default"
        whole = graph.steps[reader].results[0] if unfolds else None
        if whole is not None and same_all(graph.type(whole).shape, shape):
            graph.replace(whole, made)
    graph.change(index, Call("aten.view.default", (Ref(made), size_args(type_.shape)), (), step.results))


# -------------------------------------------------------------------------------------------------- operands and masks


def _fits(graph: Graph, scores: _Scores, value: str) -> bool:
    """Say whether the operator takes these operands: equal batches and heads, masks of the queries' type."""
    q, k, v = (graph.type(name) for name in (scores.query, scores.transposed_key, value))
    if not len(q.shape) == len(k.shape) == len(v.shape) == 4 or not q.dtype == k.dtype == v.dtype:
        return False
    if not same_all(q.shape[:2], k.shape[:2]) or not same_all(q.shape[:2], v.shape[:2]):
        return False
    whole = (*q.shape[:3], k.shape[3])
    if any(graph.type(name).dtype != q.dtype or not _broadcasts(graph, name, whole) for name in scores.added):
        return False
    if not all(graph.type(name).dtype == "bool" and _broadcasts(graph, name, whole) for name, _ in scores.excluded):
        return False
    # A mask of bools excludes for good; beside anything that is added, finite numbers are added as well.
    infinite = [fill for _, fill in scores.excluded if math.isinf(fill)]
    return not infinite or (len(scores.excluded) == 1 and not scores.added)


def _broadcasts(graph: Graph, name: str, whole: tuple[Dim, ...]) -> bool:
    shape = graph.type(name).shape
    return len(shape) <= 4 and all(n == 1 or same(n, m) for n, m in zip(shape[::-1], whole[::-1], strict=False))


def _mask(graph: Graph, index: int, scores: _Scores) -> Ref | None:
    """Add the steps that make the operator's one mask."""
    dtype = graph.type(scores.query).dtype

    def put(call: Call, dtype: str, like: str, shape: tuple[Dim, ...]) -> str:
        return graph.add(index, call, make_type(dtype, shape), like)

    terms = list(scores.added)
    for name, fill in scores.excluded:
        shape = graph.type(name).shape
        if math.isinf(fill):
            return Ref(put(Call("aten.logical_not.default", (Ref(name),)), "bool", name, shape))
        number_ = put(Call("aten.to.dtype", (Ref(name), TorchName("dtype", dtype))), dtype, name, shape)
        terms.append(put(Call("aten.mul.Scalar", (Ref(number_), fill)), dtype, name, shape))
    total = terms[0] if terms else None
    for term in terms[1:]:
        shape = _joint(graph.type(str(total)).shape, graph.type(term).shape)
        total = put(Call("aten.add.Tensor", (Ref(str(total)), Ref(term))), dtype, term, shape)
    return None if total is None else Ref(total)


def _joint(a: tuple[Dim, ...], b: tuple[Dim, ...]) -> tuple[Dim, ...]:
    rank = max(len(a), len(b))
    padded = ((1,) * (rank - len(shape)) + shape for shape in (a, b))
    return tuple(m if n == 1 else n for n, m in zip(*padded, strict=True))


# ------------------------------------------------------------------------------------------------------------ matching


def _weights_of(graph: Graph, arg: Arg) -> _Scores | None:
    """Return the scores when `arg` is their softmax over the keys, in any type."""
    found = _uncast(graph, arg)
    step = graph.made_by(found, "aten.softmax.int")
    if step is None or not isinstance(found, Ref) or not graph.read_once(found.name):
        return None
    return _scores(graph, step.args[0]) if step.args[1] == 3 else None


def _uncast(graph: Graph, arg: Arg) -> Arg:
    """Return what a private value is a cast of, between floating-point types."""
    step = graph.made_by(arg, "aten.to.dtype")
    if step is None or not isinstance(arg, Ref) or not graph.read_once(arg.name) or not isinstance(step.args[0], Ref):
        return arg
    dtypes = (graph.type(name).dtype for name in (arg.name, step.args[0].name))
    return step.args[0] if all("float" in dtype for dtype in dtypes) else arg


def _scores(graph: Graph, arg: Arg) -> _Scores | None:
    """Follow a private value down to the product of queries and keys."""
    arg = _uncast(graph, arg)
    if not isinstance(arg, Ref) or not graph.read_once(arg.name):
        return None
    index = graph.producer.get(arg.name)
    step = None if index is None else graph.steps[index]
    if step is None or not isinstance(step.args[0], Ref):
        return None
    match step.op:
        case "aten.matmul.default" | "aten.bmm.default":
            k = step.args[1]
            return _Scores(step.args[0].name, k.name, 1.0) if isinstance(k, Ref) else None
        case "aten.view.default":
            return _unfolding(graph, step)
        case "aten.add.Tensor":
            return _added(graph, step)
        case "aten.masked_fill.Scalar":
            return _excluded(graph, step)
        case "aten.mul.Scalar" | "aten.div.Scalar":
            return _scaled(graph, step)
    return None


def _unfolding(graph: Graph, step: Call) -> _Scores | None:
    """Follow scores whose batch and heads are folded below here."""
    shape = graph.type(str(step.results[0])).shape
    source = step.args[0]
    if len(shape) != 4 or not isinstance(source, Ref):
        return None
    if not same_all((product(shape[:2]), *shape[2:]), graph.type(source.name).shape):
        return None
    inner = _scores(graph, source)
    return None if inner is None or inner.excluded else inner._replace(folded=len(inner.added))


def _scaled(graph: Graph, step: Call) -> _Scores | None:
    inner, factor = _scores(graph, step.args[0]), number(step.args[1])
    if inner is None or factor is None or factor <= 0 or inner.added or inner.excluded:
        return None
    return inner._replace(scale=inner.scale * factor if step.op == "aten.mul.Scalar" else inner.scale / factor)


def _excluded(graph: Graph, step: Call) -> _Scores | None:
    inner, mask, fill = _scores(graph, step.args[0]), step.args[1], _number(step.args[2])
    if inner is None or not isinstance(mask, Ref) or fill is None or fill > _NEVER:
        return None
    return inner._replace(excluded=(*inner.excluded, (mask.name, fill)))


def _number(arg: Arg) -> float | None:
    """Return a number, infinite ones too."""
    return float(arg.text) if isinstance(arg, Real) else number(arg)


def _added(graph: Graph, step: Call) -> _Scores | None:
    """Follow the sum of a mask and scores; `alpha` is a factor of the second."""
    factor = number(dict(step.kwargs).get("alpha", 1))
    if factor is None or factor <= 0:
        return None
    orders = pairs(step) if factor == 1 else pairs(step)[1:]
    for inner, term in orders:
        found = _scores(graph, Ref(inner))
        if found is not None and not found.excluded and (factor == 1 or not found.added):
            return found._replace(scale=found.scale * factor, added=(*found.added, term))
    return None
