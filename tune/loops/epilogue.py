"""Lowering a matmul form: which call multiplies, where its operands lie, and the pointwise rest over the output tile.

The rest is a `LoopNest` over `([batch,] m, n)` that loads the product from virtual slots: `acc`, or `acc0` and `acc1`
when two halves of the columns meet in one result (SwiGLU). Accumulators hold the unrounded product; a bias that belongs
to the matmul is added before the first rounding, as libraries do.
"""

from collections.abc import Mapping, Sequence

import msgspec

from tune_model.runtime.program import Form, Ref
from tune_model.tune.candidate import Rejected
from tune_model.tune.loops.affine import Affine, NeedSplit, NotAffineError, variable
from tune_model.tune.loops.assemble import RawNest, RawStore, assemble, remove_axis
from tune_model.tune.loops.body import Body, Step, Unsupported, read_body
from tune_model.tune.loops.builder import Builder, Coordinates, RawLoad, RawNode, Request, Space, wide
from tune_model.tune.loops.ir import Access, Axis, LoopNest
from tune_model.tune.loops.lower import RULES

__all__ = ["MATMULS", "Accumulator", "Epilogue", "lower_epilogue"]

MATMULS = frozenset({"aten.linear", "aten.mm", "aten.addmm", "aten.bmm", "aten.baddbmm", "aten.matmul"})

MAX_ATTEMPTS = 64


class Accumulator(msgspec.Struct, frozen=True):
    """A virtual slot: columns `column` to `column + n` of the product."""

    slot: str
    column: int


class Epilogue(msgspec.Struct, frozen=True):
    """A matmul form taken apart.

    Attributes:
        call: Position of the matmul in the body.
        a: The left operand over `([batch,] m, k)`.
        b: The right operand over `([batch,] k, n)`, n being columns of the whole product.
        dtype: Of both operands.
        k: Length of the dot products.
        columns: Of the whole product: `n` times the number of accumulators.
        accumulators: In order of their columns.
        nest: Axes `([batch,] m, n)`, no inner ones; the accumulators' strides are those of a contiguous product.
    """

    call: int
    a: Access
    b: Access
    dtype: str
    k: int
    columns: int
    accumulators: tuple[Accumulator, ...]
    nest: LoopNest

    @property
    def batch(self) -> Axis | None:
        """The batch axis of a batched matmul."""
        return self.nest.axes[0] if len(self.nest.axes) == 3 else None

    @property
    def m(self) -> Axis:
        """Rows."""
        return self.nest.axes[-2]

    @property
    def n(self) -> int:
        """Columns of the result, per accumulator."""
        return self.nest.axes[-1].size


class _Product:
    """The rule of the matmul call: reads the accumulator, and remembers at which indices."""

    def __init__(self, step: Step, k: int) -> None:
        self.step = step
        self.k = variable(k)
        self.indices: list[Coordinates] = []

    def __call__(self, b: Builder, r: Request) -> int:
        if r.at not in self.indices:
            self.indices.append(r.at)
        arguments, kind = r.step.arguments, b.body.values[r.name]
        if not kind.dtype.startswith(("float", "bfloat")):
            raise Unsupported(f"a matmul of {kind.dtype}")
        node = b.add(RawLoad("acc", r.at, wide(kind.dtype), ()))
        if b.where:
            raise Unsupported("columns of the product are moved")
        if r.step.op in {"aten.addmm", "aten.baddbmm"}:
            node = _scale(b, node, arguments["alpha"])
            if arguments["beta"] != 0:
                added = b.operand(arguments["self"], r.at, b.dtype(node))
                node = b.op("add", node, _scale(b, added, arguments["beta"]))
        elif arguments.get("bias") is not None:
            node = b.op("add", node, b.operand(arguments["bias"], r.at, b.dtype(node)))
        return b.cast(node, kind.dtype, implied=True)

    def operands(self) -> tuple[Ref, Ref]:
        arguments = self.step.arguments
        match self.step.op:
            case "aten.linear":
                return arguments["input"], arguments["weight"]
            case "aten.addmm":
                return arguments["mat1"], arguments["mat2"]
            case "aten.baddbmm":
                return arguments["batch1"], arguments["batch2"]
            case "aten.matmul":
                return arguments["self"], arguments["other"]
            case _:
                return arguments["self"], arguments["mat2"]

    def loads(self, b: Builder, at: Coordinates) -> tuple[RawLoad, RawLoad]:
        """Return both operands where they make the product's element `at`."""
        left, right = self.operands()
        ranks = len(b.type_of(left).shape), len(b.type_of(right).shape)
        if min(ranks) < 2:
            raise Unsupported("a matmul of vectors")
        batch, m, n = at[:-2], at[-2], at[-1]
        lhs = b.value(left.name, b.broadcast(left, (*batch, m, self.k)))
        if self.step.op == "aten.linear":
            rhs = b.value(right.name, (n, self.k))
        else:
            rhs = b.value(right.name, b.broadcast(right, (*batch, self.k, n)))
        found = b.nodes[lhs], b.nodes[rhs]
        for node in found:
            if not isinstance(node, RawLoad) or node.where or node.gather:
                raise Unsupported("an operand of the matmul is computed in the form")
        return found  # type: ignore[return-value]  # checked in the loop


def _scale(b: Builder, node: int, by: float) -> int:
    return node if by == 1 else b.op("mul", node, b.constant(by, b.dtype(node)))


def lower_epilogue(form: Form) -> Epilogue | Rejected:
    """Take a concrete matmul form apart.

    Returns:
        The parts, or `Rejected("unsupported", ...)`: no or several matmuls, an operand that is computed, a reduction,
        or columns that meet in another way than two halves.
    """
    try:
        return _lower(form)
    except (Unsupported, NotAffineError) as reason:
        return Rejected("unsupported", str(reason))


def _lower(form: Form) -> Epilogue:
    body = read_body(form)
    calls = [k for k, step in enumerate(body.steps) if step.op in MATMULS]
    if len(calls) != 1:
        raise Unsupported(f"{len(calls)} matmuls; expected one")
    splits: dict[str, tuple[int, ...]] = {}
    for _ in range(MAX_ATTEMPTS):
        space = Space(splits)
        try:
            return _attempt(form, body, space, calls[0])
        except NeedSplit as need:
            splits = space.splits_after(need.variable, need.factor)
    raise Unsupported(f"no index space after {MAX_ATTEMPTS} attempts")


def _attempt(form: Form, body: Body, space: Space, call: int) -> Epilogue:
    step = body.steps[call]
    product = step.results[0] or ""
    main = form.results[0].name
    shape = body.values[main].shape
    if any(body.values[r.name].shape != shape for r in form.results):
        raise Unsupported("results of different shapes")
    at = tuple(space.root(f"r{d}", size) for d, size in enumerate(shape))
    length = _length(body, step)
    if space.root("k", length) != variable(space.roots["k"][0]):
        raise Unsupported("the columns of an operand are taken apart")
    rule = _Product(step, space.roots["k"][0])
    builder = Builder(body, space, {**RULES, step.op: rule})
    stores = [RawStore(r.name, at, builder.value(r.name, at)) for r in form.results]
    if builder.column_sizes is not None:
        raise Unsupported("a reduction after the matmul")
    index, offsets = _columns(rule.indices, body.values[product].shape[-1])
    lhs, rhs = rule.loads(builder, (*index[:-1], Affine(index[-1].terms)))
    if lhs.dtype != rhs.dtype:
        raise Unsupported(f"operands of {lhs.dtype} and {rhs.dtype}")
    batched = step.op in {"aten.bmm", "aten.baddbmm"} or (step.op == "aten.matmul" and len(rhs.at) > 2)
    groups = _groups(index, space.roots["k"][0], batched=batched)
    slots = [Accumulator(f"acc{k}" if len(offsets) > 1 else "acc", c) for k, c in enumerate(offsets)]
    names = {a.column: a.slot for a in slots}
    raw = RawNest(
        sizes=space.sizes,
        outer=tuple(sorted(groups, key=lambda v: (groups[v], v))),
        inner=(),
        whole=frozenset(p[0] for p in space.roots.values() if len(p) == 1 and groups.get(p[0], 3) < 2),
        nodes=tuple(_renamed(n, names) for n in builder.nodes),
        stores=(*stores, RawStore(lhs.slot, lhs.at, 0), RawStore(rhs.slot, rhs.at, 0)),
        groups=groups,
        virtual=dict.fromkeys(names.values(), body.values[product].shape),
    )
    nest = assemble(form, raw)
    if len(nest.axes) != len(set(groups.values())):
        raise Unsupported("rows, columns or batches that do not run through with one stride")
    a, b = (s.access for s in nest.stores[-2:])
    rows = tuple(range(len(nest.axes) - 2))
    nest = LoopNest(nest.axes, 0, nest.nodes, nest.stores[:-2], nest.requires)
    return Epilogue(
        call=call,
        a=_restrict(a, (*rows, len(nest.axes) - 1)),
        b=_restrict(b, (*rows[:-1], len(nest.axes) - 1, len(nest.axes) - 2)),
        dtype=lhs.dtype,
        k=length,
        columns=body.values[product].shape[-1],
        accumulators=tuple(slots),
        nest=remove_axis(nest, len(nest.axes) - 1),
    )


def _length(body: Body, step: Step) -> int:
    """Return the length of the dot products."""
    left = _Product(step, 0).operands()[0]
    return body.values[left.name].shape[-1]


def _columns(indices: Sequence[Coordinates], columns: int) -> tuple[Coordinates, list[int]]:
    """Return the index of the product, and where in its columns each accumulator starts."""
    if not indices:
        raise Unsupported("no result reads the matmul")
    first = indices[0]
    for index in indices:
        if index[:-1] != first[:-1] or index[-1].terms != first[-1].terms:
            raise Unsupported("columns of the product are moved")
    offsets = sorted({index[-1].constant for index in indices})
    if offsets not in ([0], [0, columns // 2]):
        raise Unsupported(f"a result reads the product's columns from {offsets} on")
    return first, offsets


def _groups(index: Coordinates, k: int, *, batched: bool) -> dict[int, int]:
    """Number the variables: batch 0, m 1, n 2, k 3."""
    groups = {k: 3}
    for d, i in enumerate(index):
        group = 2 if d == len(index) - 1 else 0 if batched and d < len(index) - 2 else 1
        if i.constant and group != 2:
            raise Unsupported("a result reads some rows of the product")
        for v in i.variables():
            if groups.setdefault(v, group) != group:
                raise Unsupported("a diagonal of the product")
    if set(groups.values()) | {0} != {0, 1, 2, 3}:
        raise Unsupported("a product without rows or columns")
    return groups


def _renamed(node: RawNode, names: Mapping[int, str]) -> RawNode:
    if isinstance(node, RawLoad) and node.slot == "acc":
        last = node.at[-1]
        return RawLoad(names[last.constant], (*node.at[:-1], Affine(last.terms)), node.dtype, node.where)
    return node


def _restrict(access: Access, axes: Sequence[int]) -> Access:
    return Access(access.slot, tuple(access.strides[k] for k in axes), access.offset)
