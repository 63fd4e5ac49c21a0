"""Reading a body backwards: the node that is a value at an index.

`Builder.value(name, index)` asks the rule of the call that made `name`; views only change the index, so they cost
nothing, and equal nodes are made once. Rules live in `views`, `pointwise` and `reductions`; what becomes of the nodes
is in `assemble`.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from tune_model.runtime.program import Ref
from tune_model.tune.loops.affine import ZERO, Affine, Ranges, flatten, reshape, variable
from tune_model.tune.loops.body import Body, Step, Unsupported, Value
from tune_model.tune.loops.ir import Cast, Constant, Op, Reduce, ReduceKind

__all__ = ["Builder", "Coordinates", "RawBound", "RawIndex", "RawInside", "RawLoad", "RawNode", "Rule", "Space", "wide"]

Coordinates = tuple[Affine, ...]
"""One index per dim of a value."""

MAX_NODES = 2000


class RawBound(NamedTuple):
    """`low <= index < high`."""

    at: Affine
    low: int
    high: int


class RawLoad(NamedTuple):
    """A slot read at an index; `gather` holds (dim, node) for dims whose index is data."""

    slot: str
    at: Coordinates
    dtype: str
    where: tuple[RawBound, ...]
    gather: tuple[tuple[int, int], ...] = ()


class RawIndex(NamedTuple):
    """An index as a number."""

    at: Affine
    dtype: str


class RawInside(NamedTuple):
    """Whether an index lies inside a bound."""

    bound: RawBound
    dtype: str = "bool"


RawNode = RawLoad | RawIndex | RawInside | Constant | Op | Cast | Reduce


class Space:
    """Loop variables. A dim of a result or of a reduction is a root; splits make several variables of it."""

    def __init__(self, splits: Mapping[str, tuple[int, ...]]) -> None:
        self._splits = splits
        self.roots: dict[str, tuple[int, ...]] = {}
        self.sizes: dict[int, int] = {}

    def root(self, name: str, size: int) -> Affine:
        """Return the index over a whole root, making its variables at first use."""
        if name not in self.roots:
            made = []
            for part in self._splits.get(name, (size,)):
                made.append(len(self.sizes))
                self.sizes[made[-1]] = part
            self.roots[name] = tuple(made)
        parts = self.roots[name]
        return flatten([variable(v) for v in parts], [self.sizes[v] for v in parts])

    def splits_after(self, variable_: int, factor: int) -> dict[str, tuple[int, ...]]:
        """Return the splits with one more."""
        result = dict(self._splits)
        for name, parts in self.roots.items():
            if variable_ in parts:
                sizes: list[int] = []
                for v in parts:
                    sizes += [self.sizes[v] // factor, factor] if v == variable_ else [self.sizes[v]]
                result[name] = tuple(sizes)
        return result


def wide(dtype: str) -> str:
    """Return the dtype that ATen computes in for an element type."""
    return "float32" if dtype in {"bfloat16", "float16"} else dtype


class Builder:
    """State of one attempt.

    Args:
        body: What to read.
        space: Its variables.
        rules: By operator without overload.
        columns: Variables that reductions run over; `None` makes new ones.
    """

    def __init__(
        self,
        body: Body,
        space: Space,
        rules: Mapping[str, "Rule"],
        columns: tuple[int, ...] | None = None,
    ) -> None:
        self.body = body
        self.space = space
        self.nodes: list[RawNode] = []
        self.where: tuple[RawBound, ...] = ()
        self.rows: set[int] = set()
        self.column_variables: tuple[int, ...] = columns or ()
        self.column_sizes: tuple[int, ...] | None = None
        if columns is not None:
            self.column_sizes = tuple(space.sizes[v] for v in columns)
        self._column_index: Coordinates = tuple(variable(v) for v in self.column_variables)
        self._rules = rules
        self._memo: dict[tuple[Any, ...], int] = {}

    @property
    def ranges(self) -> Ranges:
        """Return what variables run over where the conditions in `where` hold."""
        narrowed: dict[int, tuple[int, int]] = {}
        for (terms, constant), low, high in self.where:
            if len(terms) == 1 and terms[0][1] == 1:
                v = terms[0][0]
                first, last = narrowed.get(v, (0, self.space.sizes[v] - 1))
                narrowed[v] = (max(first, low - constant), min(last, high - 1 - constant))
        return Ranges(self.space.sizes, narrowed)

    def add(self, node: RawNode) -> int:
        """Return the position of a node, a new one only when no equal one is there."""
        key = (type(node), node)
        if key not in self._memo:
            if len(self.nodes) >= MAX_NODES:
                raise Unsupported(f"more than {MAX_NODES} nodes")
            self._memo[key] = len(self.nodes)
            self.nodes.append(node)
        return self._memo[key]

    def dtype(self, node: int) -> str:
        """Return a node's dtype."""
        return self.nodes[node].dtype

    def constant(self, value: float, dtype: str) -> int:
        """Return a number, converted as torch converts a Python scalar."""
        if dtype == "bool":
            return self._constant(bool(value), dtype)
        return self._constant(float(value) if dtype.startswith(("float", "bfloat")) else int(value), dtype)

    def _constant(self, value: float, dtype: str) -> int:
        key = (Constant, dtype, type(value), repr(value))  # repr tells -0.0 from 0.0 and lets NaN equal itself
        if key not in self._memo:
            self._memo[key] = len(self.nodes)
            self.nodes.append(Constant(value, dtype))
        return self._memo[key]

    def op(self, name: str, *args: int, dtype: str | None = None) -> int:
        """Return an operation; its dtype is that of its last operand unless given."""
        return self.add(Op(name, args, dtype or self.dtype(args[-1])))

    def cast(self, value: int, dtype: str, *, implied: bool = False) -> int:
        """Convert, where the dtype differs."""
        return value if self.dtype(value) == dtype else self.add(Cast(value, dtype, implied))

    def type_of(self, ref: Ref) -> Value:
        """Return a value's type."""
        return self.body.values[ref.name]

    def value(self, name: str, index: Coordinates) -> int:
        """Return the node that is `name` at `index`, in the value's own dtype.

        Raises:
            Unsupported: No rule, or a rule gives up.
        """
        key = ("value", name, index, self.where)
        if key not in self._memo:
            self._memo[key] = self._make(name, index)
        return self._memo[key]

    def _make(self, name: str, index: Coordinates) -> int:
        produced = self.body.producers.get(name)
        if produced is None:
            return self.add(RawLoad(name, index, self.body.values[name].dtype, self.where))
        step, position = produced
        rule = self._rules.get(step.op)
        if rule is None:
            raise Unsupported(f"operator {step.op}.{step.overload}")
        node = rule(self, Request(step, position, name, index))
        dtype = self.body.values[name].dtype
        if self.dtype(node) != dtype:
            raise AssertionError(f"rule of {step.op} gives {self.dtype(node)}, expected {dtype}")
        return node

    def operand(self, arg: Any, index: Coordinates, dtype: str) -> int:
        """Return an argument of a broadcasting call at the result's index, converted to `dtype`."""
        if not isinstance(arg, Ref):
            return self.constant(arg, dtype)
        return self.cast(self.value(arg.name, self.broadcast(arg, index)), dtype)

    def broadcast(self, ref: Ref, index: Coordinates) -> Coordinates:
        """Return the index into an operand that is broadcast to the rank and sizes of `index`."""
        shape = self.body.values[ref.name].shape
        own = index[len(index) - len(shape) :]
        return tuple(ZERO if size == 1 and not self._single(i) else i for size, i in zip(shape, own, strict=True))

    def _single(self, index: Affine) -> bool:
        return index.constant == 0 and all(self.space.sizes[v] == 1 for v in index.variables())

    def reduce(self, kind: ReduceKind, shape: tuple[int, ...], dims: tuple[int, ...], of: "Reduced") -> int:
        """Return the reduction over `dims` of a value of `shape`.

        Args:
            kind: How.
            shape: Of what is reduced.
            dims: Which dims, not negative, in order.
            of: The index of the rest, and the element.
        """
        columns = self.columns(tuple(shape[d] for d in dims))
        rows = [i for d, i in enumerate(of.at) if d not in dims]
        used = frozenset[int]().union(*(i.variables() for i in rows))
        if used & set(self.column_variables):
            raise Unsupported("a reduction inside another one's columns, or over other columns than the result's")
        self.rows |= used
        inner = dict(zip(dims, columns, strict=True))
        before = self.where  # what masks a column of the result does not mask the columns of the reduction
        self.where = tuple(w for w in before if not w.at.variables() & set(self.column_variables))
        element = of.element(tuple(inner.get(d, i) for d, i in enumerate(of.at)))
        self.where = before
        if kind in {"argmax", "argmin"}:
            return self.add(Reduce(kind, element, "int64"))
        return self.add(Reduce(kind, element, of.dtype))

    def columns(self, sizes: tuple[int, ...]) -> Coordinates:
        """Return the index over the columns as dims of these sizes."""
        if self.column_sizes is None:
            self.column_sizes = sizes
            self._column_index = tuple(self.space.root(f"c{k}", size) for k, size in enumerate(sizes))
            self.column_variables = tuple(v for k in range(len(sizes)) for v in self.space.roots[f"c{k}"])
        if math.prod(sizes) != math.prod(self.column_sizes):
            raise Unsupported(f"reductions over {math.prod(self.column_sizes)} and over {math.prod(sizes)} columns")
        return reshape(self._column_index, self.column_sizes, sizes, self.ranges)


class Reduced(NamedTuple):
    """What `Builder.reduce` reduces.

    Attributes:
        at: Full index; entries at reduced dims are ignored.
        element: Gives the node at a full index.
        dtype: Accumulate in this.
    """

    at: Coordinates
    element: Callable[[Coordinates], int]
    dtype: str


class Request(NamedTuple):
    """What a rule is asked for: result `position` (named `name`) of `step` at `index`."""

    step: Step
    position: int
    name: str
    at: Coordinates


Rule = Callable[[Builder, Request], int]
