"""The axes of a region: which dims of its values are the same loop.

Every dim of every value is a list of axes. A pointwise operator makes the axes of its operands those of its result; a
reshape cuts or joins lists; a permutation reorders them; dims of size 1 and broadcast dims have none. What remains
after all calls were walked is the smallest set of loops, and all reshapes and permutations have vanished from the
region: they only say in which order memory runs through the axes.

Slices and concatenations make a new axis in the *place* of another: both run over the same loop, shifted or shortened.
"""

from collections.abc import Mapping

from tune_model.extract.algebra import Polynomial, polynomial
from tune_model.extract.layout import arg_dim
from tune_model.extract.regions.vocabulary import OpClass, classify
from tune_model.extract.rewrite import schema
from tune_model.runtime.program import Arg, Call, Items, Ref, TensorType

__all__ = ["Axes", "Misfit", "dims_of", "reduced_dims", "tensor_refs"]

Dims = list[list[int]]
ONE = polynomial(1)

_POSITIONS = frozenset({"aten.argmax.default", "aten.argmin.default"})


class Misfit(Exception):  # noqa: N818 - a reason not to form a region, not a fault
    """These calls have no common set of loops; the text says what does not fit."""


def tensor_refs(args: tuple[Arg, ...]) -> list[str]:
    """Return the tensors among arguments, lists included."""
    found: list[str] = []
    for arg in args:
        if isinstance(arg, Ref):
            found.append(arg.name)
        elif isinstance(arg, Items):
            found += tensor_refs(arg.items)
    return found


class Axes:
    """The axes of a growing list of calls.

    Args:
        types: Type of every value the calls read or make.
    """

    def __init__(self, types: Mapping[str, TensorType]) -> None:
        self._types = types
        self._size: list[Polynomial] = []
        self._parts: list[tuple[int, ...] | None] = []
        self._solid: set[int] = set()
        self._place: list[int] = []
        self._dims: dict[str, Dims] = {}
        self.reduced: set[int] = set()
        """Axes that are reduced or normalised over."""
        self.table_rows: set[int] = set()
        """Axes that are chosen from by number."""

    # ------------------------------------------------------------------------------------------------------- the table

    def _new(self, size: Polynomial) -> list[int]:
        if size == ONE:
            return []
        self._size.append(size)
        self._parts.append(None)
        self._place.append(len(self._size) - 1)
        return [len(self._size) - 1]

    def _atoms(self, axes: list[int]) -> list[int]:
        found: list[int] = []
        for axis in axes:
            parts = self._parts[axis]
            if parts is None:
                found.append(axis)
            else:
                found += self._atoms(list(parts))
        return found

    def size(self, axis: int) -> Polynomial:
        """Return an axis's size."""
        return self._size[axis]

    def place(self, axis: int) -> int:
        """Return the place of an axis: axes related by slices and concatenations share one."""
        (atom,) = self._atoms([axis])
        while self._place[atom] != atom:
            (atom,) = self._atoms([self._place[atom]])
        return atom

    def is_solid(self, axis: int) -> bool:
        """Say whether an axis must stay whole and alone: reduced, sliced, or a matmul's."""
        return axis in self._solid

    def dims(self, name: str) -> Dims:
        """Return the axes of each dim of a value."""
        known = self._dims.get(name)
        if known is None:
            known = self._dims[name] = [self._new(polynomial(s)) for s in self._types[name].shape]
        return [self._atoms(d) for d in known]

    def places(self, name: str) -> frozenset[int]:
        """Return the places a value runs over."""
        return frozenset(self.place(a) for d in self.dims(name) for a in d)

    @property
    def values(self) -> tuple[str, ...]:
        """Every value seen so far."""
        return tuple(self._dims)

    def _unify(self, left: list[int], right: list[int]) -> None:
        a, b = self._atoms(left), self._atoms(right)
        while a and b:
            x, y = a.pop(), b.pop()
            if x == y:
                continue
            if self._size[x] == self._size[y]:
                self._join(x, y)
            elif (outer := self._size[x].over(self._size[y])) is not None:
                a += self._split(x, outer, y)[:1]
            elif (outer := self._size[y].over(self._size[x])) is not None:
                b += self._split(y, outer, x)[:1]
            else:
                raise Misfit("dims are cut at different places")
            a, b = self._atoms(a), self._atoms(b)
        if a or b:
            raise Misfit("dims of different sizes")

    def _join(self, x: int, y: int) -> None:
        place_x, place_y = self.place(x), self.place(y)
        self._parts[y] = (x,)
        if y in self._solid:
            self._solid.add(x)
        if y in self.reduced:
            self.reduced.add(x)
        # `place` resolves replaced axes, so a root that is replaced hands its place on by itself.
        if place_x == y:
            self._place[x] = x
        elif place_y not in {place_x, y}:
            self._place[place_y] = place_x

    def _split(self, axis: int, outer: Polynomial, inner: int) -> list[int]:
        if axis in self._solid:
            raise Misfit("an axis that must stay whole is cut")
        lead = self._new(outer)
        self._parts[axis] = (*lead, inner)
        if axis in self.reduced:
            self.reduced.update((*lead, inner))
        return [*lead, inner]

    def _single(self, axes: list[int], what: str) -> int:
        """Return the one axis of a dim and keep it whole from now on."""
        atoms = self._atoms(axes)
        if len(atoms) != 1:
            raise Misfit(f"{what} over {'no' if not atoms else 'several'} axes")
        self._solid.add(atoms[0])
        return atoms[0]

    def _relate(self, a: int, b: int) -> None:
        x, y = self.place(a), self.place(b)
        self._solid |= {a, b}
        if x != y:
            self._place[y] = x

    # ------------------------------------------------------------------------------------------------------- the calls

    def add(self, call: Call) -> None:
        """Walk one more call.

        Raises:
            Misfit: It does not run over the same loops; the axes are then in an undefined state.
        """
        (result,) = call.results
        if result is None:
            raise Misfit("a call without a result")
        match classify(call):
            case OpClass.POINTWISE | OpClass.COPY:
                dims = self._broadcast(tensor_refs((*call.args, *(v for _, v in call.kwargs))), result)
            case OpClass.VIEW:
                dims = self._view(call, result)
            case OpClass.JOIN:
                dims = self._cat(call, result)
            case OpClass.LOOKUP:
                dims = self._lookup(call)
            case OpClass.REDUCE:
                dims = self._reduce(call, result)
            case OpClass.NORMALISE:
                dims = self._normalise(call)
            case OpClass.MATMUL:
                dims = self._matmul(call, result)
            case _:
                raise Misfit(f"{call.op} has no loops")
        self._dims[result] = dims

    def check(self) -> None:
        """Refuse values that run over one place twice (a matrix and its transpose in one sum)."""
        for name in self._dims:
            places = [self.place(a) for d in self.dims(name) for a in d]
            if len(set(places)) != len(places):
                raise Misfit("a value runs over one loop twice")

    def _broadcast(self, operands: list[str], result: str) -> Dims:
        shape = [polynomial(s) for s in self._types[result].shape]
        dims: list[list[int] | None] = [[] if s == ONE else None for s in shape]
        for name in operands:
            mine = self.dims(name)
            for back, (size, axes) in enumerate(zip(reversed(self._types[name].shape), reversed(mine), strict=True), 1):
                if size == 1:
                    continue
                if polynomial(size) != shape[-back]:
                    raise Misfit("operands of different sizes")
                known = dims[-back]
                if known is None:
                    dims[-back] = axes
                else:
                    self._unify(known, axes)
        if any(d is None for d in dims):
            raise Misfit("a result larger than its operands")
        return [d or [] for d in dims]

    def _view(self, call: Call, result: str) -> Dims:
        source = tensor_refs(call.args[:1])[0]
        dims = self.dims(source)
        match call.op:
            case "aten.permute.default":
                order = call.args[1]
                return [dims[int(arg_dim(a))] for a in order.items] if isinstance(order, Items) else dims
            case "aten.expand.default":
                return self._expand(source, dims, result)
            case "aten.slice.Tensor":
                at = int(arg_dim(call.args[1]))
                whole = self._single(dims[at], "a slice")
                part = self._new(polynomial(self._types[result].shape[at]))
                if part:
                    self._relate(whole, part[0])
                return [*dims[:at], part, *dims[at + 1 :]]
            case _:
                new = [self._new(polynomial(s)) for s in self._types[result].shape]
                self._unify([a for d in dims for a in d], [a for d in new for a in d])
                return new

    def _expand(self, source: str, dims: Dims, result: str) -> Dims:
        shape = self._types[result].shape
        lead = len(shape) - len(dims)
        kept: Dims = [self._new(polynomial(s)) for s in shape[:lead]]
        for size, old, axes in zip(shape[lead:], self._types[source].shape, dims, strict=True):
            kept.append(axes if old != 1 or size == 1 else self._new(polynomial(size)))
        return kept

    def _cat(self, call: Call, result: str) -> Dims:
        names = tensor_refs(call.args[:1])
        at = int(arg_dim(call.args[1])) if len(call.args) > 1 else 0
        whole = self._new(polynomial(self._types[result].shape[at]))
        if not whole:
            raise Misfit("a concatenation of nothing")
        self._solid.add(whole[0])
        dims = self.dims(names[0])
        for name in names:
            mine = self.dims(name)
            for axis, (a, b) in enumerate(zip(dims, mine, strict=True)):
                if axis != at:
                    self._unify(a, b)
            if mine[at]:
                self._relate(whole[0], self._single(mine[at], "a concatenation"))
        return [*dims[:at], whole, *dims[at + 1 :]]

    def _lookup(self, call: Call) -> Dims:
        """The numbers' dims, then the table's columns; its rows are no loop."""
        table, numbers = tensor_refs(call.args[:2])
        rows, columns = self.dims(table)
        self.table_rows.update(rows)
        return [*self.dims(numbers), columns]

    def _reduce(self, call: Call, result: str) -> Dims:
        source = tensor_refs(call.args[:1])[0]
        dims = self.dims(source)
        chosen = reduced_dims(call, len(dims))
        keep = len(self._types[result].shape) == len(dims)
        if isinstance(chosen, int):
            # A position along the dim is asked for: it must stay one loop.
            self.reduced.add(self._single(dims[chosen], "a reduction"))
            chosen = (chosen,)
        axes = [a for at in chosen for a in dims[at]]
        if not axes:
            raise Misfit("a reduction over one element")
        self.reduced.update(axes)
        return [([] if i in chosen else d) for i, d in enumerate(dims) if keep or i not in chosen]

    def _normalise(self, call: Call) -> Dims:
        source = tensor_refs(call.args[:1])[0]
        dims = self.dims(source)
        at = len(dims) - 1
        if "softmax" in call.op:
            at = int(arg_dim(call.args[1]))
        elif not isinstance(call.args[1], Items) or len(call.args[1].items) != 1:
            raise Misfit("a norm over several dims")
        self.reduced.add(self._single(dims[at], "a normalisation"))
        for vector in tensor_refs(call.args[2:]):
            self._unify(dims[at], self.dims(vector)[0])
        return dims

    def _matmul(self, call: Call, result: str) -> Dims:
        left, right, *bias = tensor_refs(call.args)
        a, b = self.dims(left), self.dims(right)
        if call.op == "aten.linear.default":
            self._unify(a[-1], b[1])
            self._single(a[-1], "a matmul's sum")
            if b[0]:
                self._single(b[0], "a matmul's columns")
            for vector in bias:
                self._unify(b[0], self.dims(vector)[-1])
            return [*a[:-1], b[0]]
        if min(len(a), len(b)) < 2:
            raise Misfit("a product with a vector")
        self._unify(a[-1], b[-2])
        self._single(a[-1], "a matmul's sum")
        if b[-1]:
            self._single(b[-1], "a matmul's columns")
        lead: Dims = []
        for back in range(3, len(self._types[result].shape) + 1):
            options = [d[-back] for d in (a, b) if back <= len(d) and d[-back]]
            if len(options) == 2:
                self._unify(options[0], options[1])
            lead.insert(0, options[0] if options else [])
        return [*lead, a[-2], b[-1]]


def reduced_dims(call: Call, rank: int) -> tuple[int, ...] | int:
    """Return the dims that a call reduces: a list, or the only one where the schema has one.

    Raises:
        Misfit: It reduces the flattened tensor, which has no dims.
    """
    given = schema.arguments(call)
    if "dim" not in given:
        raise Misfit("a reduction over all elements at once")
    dims = given["dim"]
    if isinstance(dims, Items):
        chosen = sorted(int(arg_dim(a)) % rank for a in dims.items)
        return tuple(chosen) or tuple(range(rank))
    if dims is None:
        if call.op in _POSITIONS:
            raise Misfit("a position among all elements")
        return tuple(range(rank))
    return int(arg_dim(dims)) % rank


def dims_of(calls: tuple[Call, ...], types: Mapping[str, TensorType]) -> Axes:
    """Return the axes of a list of calls.

    Raises:
        Misfit: They have no common set of loops.
    """
    axes = Axes(types)
    for call in calls:
        axes.add(call)
    axes.check()
    return axes
