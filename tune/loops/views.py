"""Rules of calls that only move elements: views, slices, concatenation, padding, gathers of rows."""

from tune_model.runtime.program import Ref
from tune_model.tune.loops.affine import ZERO, Affine, divide, limits, reshape
from tune_model.tune.loops.body import Unsupported
from tune_model.tune.loops.builder import Builder, Coordinates, RawBound, RawInside, RawLoad, Request, Rule

__all__ = ["VIEWS"]


def _source(b: Builder, r: Request, key: str = "self") -> tuple[Ref, tuple[int, ...]]:
    ref = r.step.arguments[key]
    return ref, b.type_of(ref).shape


def _axis(dim: int, rank: int) -> int:
    return dim + rank if dim < 0 else dim


def _same(b: Builder, r: Request) -> int:
    return b.value(r.step.arguments["self"].name, r.at)


def _reshape(b: Builder, r: Request) -> int:
    ref, shape = _source(b, r)
    return b.value(ref.name, reshape(r.at, b.body.values[r.name].shape, shape, b.ranges))


def _expand(b: Builder, r: Request) -> int:
    ref, _ = _source(b, r)
    return b.value(ref.name, b.broadcast(ref, r.at))


def _permute(b: Builder, r: Request) -> int:
    ref, shape = _source(b, r)
    rank = len(shape)
    match r.step.op:
        case "aten.permute":
            order = [_axis(d, rank) for d in r.step.arguments["dims"]]
        case "aten.t":
            order = list(range(rank))[::-1]
        case _:
            order = list(range(rank))
            first, second = (_axis(r.step.arguments[k], rank) for k in ("dim0", "dim1"))
            order[first], order[second] = order[second], order[first]
    index = [ZERO] * rank
    for to, source in enumerate(order):
        index[source] = r.at[to]
    return b.value(ref.name, tuple(index))


def _slice(b: Builder, r: Request) -> int:
    ref, shape = _source(b, r)
    arguments = r.step.arguments
    dim = _axis(arguments["dim"], len(shape))
    size, start = shape[dim], arguments["start"]
    start = 0 if start is None else min(max(start + size if start < 0 else start, 0), size)
    return b.value(ref.name, _moved(r.at, dim, r.at[dim].times(arguments["step"]).shift(start)))


def _moved(index: Coordinates, dim: int, to: Affine) -> Coordinates:
    return (*index[:dim], to, *index[dim + 1 :])


def _narrow(b: Builder, r: Request) -> int:
    ref, shape = _source(b, r)
    dim, start = _axis(r.step.arguments["dim"], len(shape)), r.step.arguments["start"]
    start = start + shape[dim] if start < 0 else start
    return b.value(ref.name, _moved(r.at, dim, r.at[dim].shift(start)))


def _select(b: Builder, r: Request) -> int:
    ref, shape = _source(b, r)
    dim = _axis(r.step.arguments["dim"], len(shape))
    at = r.step.arguments["index"] if r.step.op == "aten.select" else r.position
    at = at + shape[dim] if at < 0 else at
    return b.value(ref.name, (*r.at[:dim], Affine((), at), *r.at[dim:]))


def _split(b: Builder, r: Request) -> int:
    ref, shape = _source(b, r)
    arguments = r.step.arguments
    dim = _axis(arguments["dim"], len(shape))
    if r.step.op == "aten.chunk":
        width = -(-shape[dim] // arguments["chunks"])
        start = width * r.position
    else:
        sizes: int | tuple[int, ...] = arguments["split_size" if "split_size" in arguments else "split_sizes"]
        start = sizes * r.position if isinstance(sizes, int) else sum(sizes[: r.position])
    return b.value(ref.name, _moved(r.at, dim, r.at[dim].shift(start)))


def _flip(b: Builder, r: Request) -> int:
    ref, shape = _source(b, r)
    dims = {_axis(d, len(shape)) for d in r.step.arguments["dims"]}
    index = tuple(i.times(-1).shift(shape[d] - 1) if d in dims else i for d, i in enumerate(r.at))
    return b.value(ref.name, index)


def _repeat(b: Builder, r: Request) -> int:
    ref, shape = _source(b, r)
    index = list(r.at[len(r.at) - len(shape) :])
    for d, size in enumerate(shape):
        if limits(index[d], b.ranges)[1] >= size:
            index[d] = ZERO if size == 1 else divide(index[d], size, b.ranges)[1]
    return b.value(ref.name, tuple(index))


def _repeat_interleave(b: Builder, r: Request) -> int:
    if r.step.overload != "self_int" or r.step.arguments["dim"] is None:
        raise Unsupported("repeat_interleave by a tensor or flattened")
    ref, shape = _source(b, r)
    dim = _axis(r.step.arguments["dim"], len(shape))
    quotient, _ = divide(r.at[dim], r.step.arguments["repeats"], b.ranges)
    return b.value(ref.name, _moved(r.at, dim, quotient))


def _under(b: Builder, bound: RawBound, ref: Ref, index: Coordinates) -> int:
    """Read a value where `bound` holds; elsewhere its loads are masked."""
    low, high = limits(bound.at, b.ranges)
    if bound.low <= low and high < bound.high:
        return b.value(ref.name, index)
    before = b.where
    b.where = before if bound in before else (*before, bound)
    node = b.value(ref.name, index)
    b.where = before
    return node


def _cat(b: Builder, r: Request) -> int:
    tensors: tuple[Ref, ...] = tuple(
        t for t in r.step.arguments["tensors"] if b.type_of(t).shape != (0,) or b.body.values[r.name].shape == (0,)
    )
    rank = len(r.at)
    dim = _axis(r.step.arguments["dim"], rank)
    stacked = r.step.op == "aten.stack"
    along = r.at[dim]
    low, high = limits(along, b.ranges)
    dtype = b.body.values[r.name].dtype
    start, result = 0, None
    for ref in tensors:
        size = 1 if stacked else b.type_of(ref).shape[dim]
        bound = RawBound(along, start, start + size)
        if start <= high and low < start + size:
            index = (*r.at[:dim], *r.at[dim + 1 :]) if stacked else _moved(r.at, dim, along.shift(-start))
            piece = b.cast(_under(b, bound, ref, index), dtype)
            # Later pieces override: each is chosen from its own start on.
            result = piece if result is None else b.op("where", b.add(RawInside(bound)), piece, result)
        start += size
    if result is None:
        return b.constant(0, dtype)
    return result


def _pad(b: Builder, r: Request) -> int:
    ref, shape = _source(b, r)
    pads = r.step.arguments["pad"]
    fill = b.constant(r.step.arguments["value"], b.body.values[r.name].dtype)
    bounds: list[RawBound] = []
    index = list(r.at)
    for k in range(len(pads) // 2):
        dim = len(shape) - 1 - k
        index[dim] = index[dim].shift(-pads[2 * k])
        low, high = limits(index[dim], b.ranges)
        if low < 0 or high >= shape[dim]:
            bounds.append(RawBound(index[dim], 0, shape[dim]))
    before = b.where
    b.where = (*before, *(x for x in bounds if x not in before))
    node = b.value(ref.name, tuple(index))
    b.where = before
    for bound in bounds:
        node = b.op("where", b.add(RawInside(bound)), node, fill)
    return node


def _table_row(b: Builder, table: Ref, dim: int, node: int, index: Coordinates) -> int:
    if table.name in b.body.producers:
        raise Unsupported("a gather from a computed table")
    kind = b.body.values[table.name]
    if kind.shape[dim] == 0:
        raise Unsupported("a gather from an empty table")
    return b.add(RawLoad(table.name, index, kind.dtype, b.where, ((dim, node),)))


def _embedding(b: Builder, r: Request) -> int:
    table, ids = r.step.arguments["weight"], r.step.arguments["indices"]
    node = b.value(ids.name, r.at[:-1])
    return _table_row(b, table, 0, b.cast(node, "int64"), (ZERO, r.at[-1]))


def _index_select(b: Builder, r: Request) -> int:
    table, ids = r.step.arguments["self"], r.step.arguments["index"]
    dim = _axis(r.step.arguments["dim"], len(r.at))
    node = b.value(ids.name, (r.at[dim],))
    return _table_row(b, table, dim, b.cast(node, "int64"), _moved(r.at, dim, ZERO))


def _index(b: Builder, r: Request) -> int:
    """`x[ids]` with one index tensor, on any one dim."""
    table, indices = r.step.arguments["self"], r.step.arguments["indices"]
    given = [(d, ref) for d, ref in enumerate(indices) if ref is not None]
    if len(given) != 1:
        raise Unsupported("indexing by several tensors")
    dim, ids = given[0]
    kind = b.type_of(ids)
    if kind.dtype in {"bool", "uint8"}:
        raise Unsupported("indexing by a mask")
    rank = len(kind.shape)
    size = b.type_of(table).shape[dim]
    node = b.cast(b.value(ids.name, r.at[dim : dim + rank]), "int64")
    wrapped = b.op("add", node, b.constant(size, "int64"))
    node = b.op("where", b.op("lt", node, b.constant(0, "int64"), dtype="bool"), wrapped, node)
    return _table_row(b, table, dim, node, (*r.at[:dim], ZERO, *r.at[dim + rank :]))


VIEWS: dict[str, Rule] = {
    **dict.fromkeys(("aten.alias", "aten.clone", "aten.contiguous", "aten.detach", "aten.lift_fresh_copy"), _same),
    **dict.fromkeys(
        (
            "aten.view",
            "aten.reshape",
            "aten._unsafe_view",
            "aten.flatten",
            "aten.unflatten",
            "aten.squeeze",
            "aten.unsqueeze",
            "aten.view_as",
        ),
        _reshape,
    ),
    **dict.fromkeys(("aten.expand", "aten.expand_as"), _expand),
    **dict.fromkeys(("aten.permute", "aten.t", "aten.transpose"), _permute),
    "aten.slice": _slice,
    "aten.narrow": _narrow,
    **dict.fromkeys(("aten.select", "aten.unbind"), _select),
    **dict.fromkeys(("aten.split", "aten.split_with_sizes", "aten.chunk"), _split),
    "aten.flip": _flip,
    "aten.repeat": _repeat,
    "aten.repeat_interleave": _repeat_interleave,
    **dict.fromkeys(("aten.cat", "aten.stack"), _cat),
    "aten.constant_pad_nd": _pad,
    "aten.embedding": _embedding,
    "aten.index_select": _index_select,
    "aten.at": _index,
}
