"""From nodes over variables to a `LoopNest`: order the axes, find which sizes may differ, merge axes, write strides."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol, TypeVar

from tune_model.runtime.expression import Dim, evaluate, product
from tune_model.runtime.kernel import Requirement, Within
from tune_model.runtime.program import Form, TensorType
from tune_model.runtime.replay import contiguous_strides, slot_sizes
from tune_model.tune.loops.affine import Affine
from tune_model.tune.loops.builder import Coordinates, RawBound, RawIndex, RawInside, RawLoad, RawNode
from tune_model.tune.loops.graph import prune
from tune_model.tune.loops.ir import (
    Access,
    Axis,
    Bound,
    Gather,
    Index,
    Inside,
    Load,
    LoopNest,
    Node,
    Store,
)

__all__ = ["RawNest", "RawStore", "assemble", "remove_axis"]

T = TypeVar("T", int, Dim)


class _Pick(Protocol):
    """Rewrites a tuple that has one entry per axis."""

    def __call__(self, strides: tuple[T, ...], /) -> tuple[T, ...]: ...


class RawStore(NamedTuple):
    """A result's element at an index."""

    slot: str
    at: Coordinates
    value: int


class RawNest(NamedTuple):
    """What lowering found.

    Attributes:
        sizes: Of each variable.
        outer: Row variables, in the order of the result's dims.
        inner: Column variables.
        whole: Variables that are a whole dim of a result (not a part of one), so their size may be free.
        nodes: In SSA order.
        stores: One per result.
        groups: Variables that may share an axis have one number, and none is dropped or moved; empty: rows may, and
            columns may.
        virtual: Shapes of slots that are not memory (a matmul's accumulator).
    """

    sizes: Mapping[int, int]
    outer: tuple[int, ...]
    inner: tuple[int, ...]
    whole: frozenset[int]
    nodes: tuple[RawNode, ...]
    stores: tuple[RawStore, ...]
    groups: Mapping[int, int]
    virtual: Mapping[str, tuple[int, ...]]


class _Slot(NamedTuple):
    shape: tuple[int, ...]
    strides: tuple[int, ...]


def _slot(type_: TensorType) -> _Slot:
    shape = tuple(evaluate(s, {}) for s in type_.shape)
    if type_.strides is None:
        return _Slot(shape, contiguous_strides(shape))
    return _Slot(shape, tuple(evaluate(s, {}) for s in type_.strides))


def _total(terms: Sequence[tuple[int, Dim]]) -> Dim:
    """Sum of coefficient times dim, an integer when all are."""
    if all(isinstance(d, int) for _, d in terms):
        return sum(c * d for c, d in terms if isinstance(d, int))
    return " + ".join(str(d if c == 1 else product((c, d))) for c, d in terms if c)


class _Layout:
    """Which axes are free and what each slot's strides are written as."""

    def __init__(self, form: Form, raw: RawNest) -> None:
        self.raw = raw
        self.values = slot_sizes(form)
        self.slots = {p.name: _slot(p.type) for p in (*form.parameters, *form.results)}
        self.slots |= {name: _Slot(shape, contiguous_strides(shape)) for name, shape in raw.virtual.items()}
        self.free: dict[int, Dim] = {}
        self.requires: list[Requirement] = []
        self.accesses = [(n.slot, n.at, tuple(d for d, _ in n.gather)) for n in raw.nodes if isinstance(n, RawLoad)]
        self.accesses += [(s.slot, s.at, ()) for s in raw.stores]
        literals = _literals(form)
        used = _numbered(raw.nodes)
        for v in raw.outer:
            if v in raw.whole and v not in used and (raw.sizes[v] == 1 or raw.sizes[v] not in literals):
                name = self._extent(v)
                if name is not None:
                    self.free[v] = name
        self.tied = self._tied()
        self._require()

    def _extent(self, v: int) -> str | None:
        """Return the slot size that a variable is the extent of, when it is nothing else anywhere."""
        name = None
        for slot, index, _ in self.accesses:
            for j, i in enumerate(index):
                if v not in i.variables():
                    continue
                if i != Affine(((v, 1),)) or self.slots[slot].shape[j] != self.raw.sizes[v]:
                    return None
                if slot not in self.raw.virtual:
                    name = name or f"{slot}.size{j}"
        return name

    def _tied(self) -> dict[str, dict[int, int]]:
        """Per slot: which dim is the extent of which free variable."""
        result: dict[str, dict[int, int]] = {}
        for slot, index, _ in self.accesses:
            for j, i in enumerate(index):
                for v in i.variables() & self.free.keys():
                    result.setdefault(slot, {})[j] = v
        return result

    def _follows(self, slot: str, j: int) -> bool:
        """Whether a dim's stride may change with the size of a free dim that lies inside it."""
        strides = self.slots[slot].strides
        return any(
            i != j and (strides[i] < strides[j] or (strides[i] == strides[j] and i > j))
            for i in self.tied.get(slot, {})
        )

    def _require(self) -> None:
        for name in {slot: None for slot, _, _ in self.accesses}:
            if name in self.raw.virtual:
                continue
            shape, strides = self.slots[name]
            for j, (size, stride) in enumerate(zip(shape, strides, strict=True)):
                v = self.tied.get(name, {}).get(j)
                if v is None:
                    self.requires.append(Within(f"{name}.size{j}", size, size))
                elif self.free[v] != f"{name}.size{j}":
                    self.requires.append(Within(f"{name}.size{j} - {self.free[v]}", 0, 0))
                if (v is not None or size > 1) and not self._follows(name, j):
                    self.requires.append(Within(f"{name}.stride{j}", stride, stride))

    def stride(self, slot: str, j: int) -> Dim:
        symbolic = slot not in self.raw.virtual and self._follows(slot, j)
        return f"{slot}.stride{j}" if symbolic else self.slots[slot].strides[j]

    def access(self, slot: str, index: Coordinates, skip: tuple[int, ...], axes: Sequence[int]) -> Access:
        strides = []
        for v in axes:
            terms = [
                (c, self.stride(slot, j)) for j, i in enumerate(index) if j not in skip for w, c in i.terms if w == v
            ]
            strides.append(_total(terms) if terms else 0)
        offset = [(i.constant, self.stride(slot, j)) for j, i in enumerate(index) if j not in skip and i.constant]
        return Access(slot, tuple(strides), _total(offset) if offset else 0)

    def node(self, node: RawNode, axes: Sequence[int]) -> Node:
        match node:
            case RawLoad():
                skip = tuple(d for d, _ in node.gather)
                slot = self.slots[node.slot]
                gather = tuple(Gather(n, slot.strides[d], slot.shape[d]) for d, n in node.gather)
                where = tuple(_bound(w, axes) for w in node.where)
                return Load(self.access(node.slot, node.at, skip, axes), node.dtype, where, gather)
            case RawIndex(index, dtype):
                return Index(_coefficients(index, axes), index.constant, dtype)
            case RawInside(bound, dtype):
                return Inside(_bound(bound, axes), dtype)
            case _:
                return node


def _coefficients(index: Affine, axes: Sequence[int]) -> tuple[int, ...]:
    terms = dict(index.terms)
    return tuple(terms.get(v, 0) for v in axes)


def _bound(bound: RawBound, axes: Sequence[int]) -> Bound:
    return Bound(_coefficients(bound.at, axes), bound.at.constant, bound.low, bound.high)


def _numbered(nodes: Sequence[RawNode]) -> frozenset[int]:
    """Variables whose value, not only address, matters."""
    used: set[int] = set()
    for node in nodes:
        match node:
            case RawLoad():
                for w in node.where:
                    used |= w.at.variables()
            case RawIndex(index, _):
                used |= index.variables()
            case RawInside(bound, _):
                used |= bound.at.variables()
            case _:
                pass
    return frozenset(used)


_SHAPES = frozenset(
    """
    view reshape _unsafe_view expand flatten unflatten permute transpose squeeze unsqueeze slice select split
    split_with_sizes cat stack full zeros ones layer_norm native_layer_norm rms_norm _fused_rms_norm
    """.split()  # noqa: SIM905 - a table reads better than a list of literals
)


def _literals(form: Form) -> frozenset[int]:
    """Integers in the body that could be a size used as a number; an axis of such a size is kept fixed."""
    found: set[int] = set()
    for call in form.body:
        if call.op.split(".")[1] not in _SHAPES:
            found |= {a for a in (*call.args, *(v for _, v in call.kwargs)) if type(a) is int}
    return frozenset(found)


def _vectors(nodes: Sequence[Node], stores: Sequence[Store]) -> list[tuple[tuple[Dim, ...], bool]]:
    """Every strides tuple of a nest; the flag says whether an address is made of it."""
    found: list[tuple[tuple[Dim, ...], bool]] = [(s.access.strides, True) for s in stores]
    for node in nodes:
        match node:
            case Load():
                found.append((node.access.strides, True))
                found += [(w.strides, False) for w in node.where]
            case Index():
                found.append((node.strides, False))
            case Inside():
                found.append((node.bound.strides, False))
            case _:
                pass
    return found


def _remap(nest: LoopNest, axes: tuple[Axis, ...], inner: int, pick: _Pick) -> LoopNest:
    """Rewrite every tuple that has one entry per axis."""

    def access(a: Access) -> Access:
        return Access(a.slot, pick(a.strides), a.offset)

    def bound(w: Bound) -> Bound:
        return Bound(pick(w.strides), w.offset, w.low, w.high)

    def node(n: Node) -> Node:
        match n:
            case Load():
                return Load(access(n.access), n.dtype, tuple(bound(w) for w in n.where), n.gather)
            case Index():
                return Index(pick(n.strides), n.offset, n.dtype)
            case Inside():
                return Inside(bound(n.bound), n.dtype)
            case _:
                return n

    stores = tuple(Store(access(s.access), s.value) for s in nest.stores)
    return LoopNest(axes, inner, tuple(node(n) for n in nest.nodes), stores, nest.requires)


def _merge(nest: LoopNest, values: Mapping[str, int], groups: Sequence[int]) -> LoopNest:
    """Make one axis of neighbours of one group wherever every stride allows it."""
    k = len(nest.axes) - 1
    groups = list(groups)
    while k > 0:
        k -= 1
        merged = _merged(nest, k, values) if groups[k] == groups[k + 1] else None
        if merged is not None:
            nest = merged
            del groups[k]
            k = min(k + 1, len(nest.axes) - 1)
    return nest


def _merged(nest: LoopNest, k: int, values: Mapping[str, int]) -> LoopNest | None:
    """Merge axes k and k + 1, or say that they cannot be."""
    first, second = nest.axes[k], nest.axes[k + 1]
    requires = list(nest.requires)
    for strides, _ in _vectors(nest.nodes, nest.stores):
        far, near = strides[k], strides[k + 1]
        if evaluate(far, values) != evaluate(near, values) * second.size:
            return None
        if not (isinstance(far, int) and isinstance(near, int) and isinstance(second.extent, int)) and (far, near) != (
            0,
            0,
        ):
            relation: Requirement = Within(f"({far}) - ({near})*({second.extent})", 0, 0)
            if relation not in requires:
                requires.append(relation)
    axis = Axis(first.size * second.size, product((first.extent, second.extent)))
    axes = (*nest.axes[:k], axis, *nest.axes[k + 2 :])
    inner = nest.inner - (k >= len(nest.axes) - nest.inner)
    merged = _remap(nest, axes, inner, lambda strides: (*strides[:k], *strides[k + 1 :]))
    return LoopNest(merged.axes, merged.inner, merged.nodes, merged.stores, tuple(requires))


def remove_axis(nest: LoopNest, k: int) -> LoopNest:
    """Take an outer axis away that only dropped accesses used."""
    return _remap(
        nest, (*nest.axes[:k], *nest.axes[k + 1 :]), nest.inner, lambda strides: (*strides[:k], *strides[k + 1 :])
    )


def assemble(form: Form, raw: RawNest) -> LoopNest:
    """Write a nest; row axes are ordered as the first result lies in memory.

    Args:
        form: Concrete; says where slots lie.
        raw: From lowering.
    """
    layout = _Layout(form, raw)
    outer = [v for v in raw.outer if raw.sizes[v] != 1 or v in layout.free or v in raw.groups]
    inner = [v for v in raw.inner if raw.sizes[v] != 1] or list(raw.inner[-1:])
    if not raw.groups:
        first = layout.access(raw.stores[0].slot, raw.stores[0].at, (), outer)
        distance = {v: evaluate(s, layout.values) for v, s in zip(outer, first.strides, strict=True)}
        outer.sort(key=lambda v: -abs(distance[v]))
    axes = [*outer, *inner]
    nodes = tuple(layout.node(n, axes) for n in raw.nodes)
    stores = tuple(Store(layout.access(s.slot, s.at, (), axes), s.value) for s in raw.stores)
    spans = tuple(Axis(raw.sizes[v], layout.free.get(v, raw.sizes[v])) for v in axes)
    nest = prune(LoopNest(spans, len(inner), nodes, stores, tuple(layout.requires)))
    groups = raw.groups or {v: int(k >= len(outer)) for k, v in enumerate(axes)}
    nest = _merge(nest, layout.values, [groups[v] for v in axes])
    return nest if len(nest.axes) > nest.inner else _with_row(nest)


def _with_row(nest: LoopNest) -> LoopNest:
    """Give a nest without rows one row."""
    return _remap(nest, (Axis(1, 1), *nest.axes), nest.inner, lambda strides: (0, *strides))
