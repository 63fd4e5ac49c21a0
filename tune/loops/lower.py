"""Lowering a form: from its ATen body to one `LoopNest`, or the reason why not.

An attempt reads the results backwards over an index space. It is repeated when a reshape needs a dim split in two
(`NeedSplit`), and once more when the columns of a reduction turn out to be the columns of a result, so that both share
the inner axes.
"""

import math
from collections.abc import Mapping, Sequence

from tune_model.runtime.program import Form
from tune_model.tune.candidate import Rejected
from tune_model.tune.loops.affine import ZERO, NeedSplit, NotAffineError, reshape, variable
from tune_model.tune.loops.assemble import RawNest, RawStore, assemble
from tune_model.tune.loops.body import Body, Unsupported, read_body
from tune_model.tune.loops.builder import Builder, Coordinates, Rule, Space
from tune_model.tune.loops.ir import LoopNest
from tune_model.tune.loops.pointwise import POINTWISE
from tune_model.tune.loops.reductions import REDUCTIONS
from tune_model.tune.loops.views import VIEWS

__all__ = ["RULES", "lower"]

RULES: Mapping[str, Rule] = {**POINTWISE, **REDUCTIONS, **VIEWS}

MAX_ATTEMPTS = 64


def lower(form: Form) -> LoopNest | Rejected:
    """Lower a concrete reduction or pointwise form.

    Returns:
        The nest, or `Rejected("unsupported", ...)` that names the operator or the shape in the way.
    """
    try:
        return _lower(form)
    except (Unsupported, NotAffineError) as reason:
        return Rejected("unsupported", str(reason))


def _lower(form: Form) -> LoopNest:
    body = read_body(form)
    splits: dict[str, tuple[int, ...]] = {}
    columns: tuple[int, ...] | None = None
    for _ in range(MAX_ATTEMPTS):
        space = Space(splits)
        for d, size in enumerate(body.values[_main(form, body)].shape):
            space.root(f"r{d}", size)
        builder = Builder(body, space, RULES, columns)
        try:
            raw = _attempt(form, body, builder)
        except NeedSplit as need:
            splits, columns = space.splits_after(need.variable, need.factor), None
            continue
        if columns is None and builder.column_sizes is not None:
            columns = _shared_columns(builder, raw.outer)
            if columns:
                continue
        return assemble(form, raw)
    raise Unsupported(f"no index space after {MAX_ATTEMPTS} attempts")


def _main(form: Form, body: Body) -> str:
    """Return the largest result; it spans the space."""
    return max((r.name for r in form.results), key=lambda name: math.prod(body.values[name].shape))


def _attempt(form: Form, body: Body, builder: Builder) -> RawNest:
    """Read every result at its index."""
    main = _main(form, body)
    full = body.values[main].shape
    space = builder.space
    index = tuple(space.root(f"r{d}", size) for d, size in enumerate(full))
    spanned = tuple(v for d in range(len(index)) for v in space.roots[f"r{d}"])
    inner = set(builder.column_variables)
    rows = tuple(v for v in spanned if v not in inner)
    stores = []
    for name in (r.name for r in form.results):
        own = index if name == main else _secondary(builder, (full, index), body.values[name].shape, rows)
        stores.append(RawStore(name, own, builder.value(name, own)))
    return RawNest(
        sizes=space.sizes,
        outer=rows,
        inner=builder.column_variables,
        whole=frozenset(parts[0] for parts in space.roots.values() if len(parts) == 1),
        nodes=tuple(builder.nodes),
        stores=tuple(stores),
        groups={},
        virtual={},
    )


def _secondary(
    builder: Builder, main: tuple[tuple[int, ...], Coordinates], shape: tuple[int, ...], rows: Sequence[int]
) -> Coordinates:
    """Return the index of another result over the space of the largest."""
    full, index = main
    sizes = builder.space.sizes
    if math.prod(shape) == math.prod(full):
        return reshape(index, full, shape, builder.ranges)
    if len(shape) == len(full) and all(s in {1, f} for s, f in zip(shape, full, strict=True)):
        return tuple(ZERO if s == 1 and f != 1 else i for s, f, i in zip(shape, full, index, strict=True))
    # In the first attempt the reductions' columns are not shared yet: then only the rows they were asked for count.
    for own in (rows, [v for v in rows if v in builder.rows]):
        row_sizes = [sizes[v] for v in own]
        if math.prod(row_sizes) == math.prod(shape):
            return reshape([variable(v) for v in own], row_sizes, shape, builder.ranges)
    for keep in range(len(full)):
        if math.prod(full[:keep]) == math.prod(shape):
            return reshape(index[:keep], full[:keep], shape, builder.ranges)
    for keep in range(len(full)):
        if math.prod(full[keep:]) == math.prod(shape):
            return reshape(index[keep:], full[keep:], shape, builder.ranges)
    raise Unsupported(f"results of shapes {full} and {shape}")


def _shared_columns(builder: Builder, outer: Sequence[int]) -> tuple[int, ...]:
    """Return the variables of the result that are the columns of its reductions; none when it has row values only."""
    sizes = builder.space.sizes
    width = math.prod(builder.column_sizes or ())
    free = [v for v in outer if v not in builder.rows]
    chosen: list[int] = []
    product = 1
    while free and product != width:
        v = free.pop()
        chosen.append(v)
        product *= sizes[v]
    if product == width:
        return tuple(chosen[::-1])
    if math.prod(sizes[v] for v in outer if v not in builder.rows) == 1:
        return ()
    spread = [sizes[v] for v in outer if v not in builder.rows]
    raise Unsupported(f"a reduction over {width} columns is read at {spread} columns")
