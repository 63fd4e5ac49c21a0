"""Prints Triton from the loop form: nodes as statements, accesses as masked loads and stores.

A `Space` says how the loop variables look in the kernel: each axis is a broadcastable integer tensor, and axes belong
to groups that are inside or outside together (a tile's rows and columns; all axes of a flattened index). Pointers and
runtime strides reach the generated function as one tuple, `operands`.
"""

import math
from collections.abc import Iterable
from typing import NamedTuple

from tune_model.runtime.expression import Dim, evaluate
from tune_model.runtime.program import Form
from tune_model.runtime.replay import slot_sizes
from tune_model.tune.loops.ir import (
    Access,
    Bound,
    Cast,
    Constant,
    Gather,
    Index,
    Inside,
    Load,
    LoopNest,
    Node,
    Op,
    Reduce,
    Store,
    arguments,
)
from tune_model.tune.triton.launch import Argument, SizeOf, Slot

__all__ = ["DTYPES", "Operands", "Printer", "Space", "number"]

DTYPES = {
    "bool": "tl.int1",
    "uint8": "tl.uint8",
    "int8": "tl.int8",
    "int16": "tl.int16",
    "int32": "tl.int32",
    "int64": "tl.int64",
    "float16": "tl.float16",
    "bfloat16": "tl.bfloat16",
    "float32": "tl.float32",
    "float64": "tl.float64",
}

_FLOATS = {"float16", "bfloat16", "float32", "float64"}

# {0}, {1} ... are operands; f: for floats, i: for integers and bools, both without a prefix.
_TEMPLATES = {
    "neg": "-{0}",
    "abs": "tl.abs({0})",
    "sign": "numeric.sign({0})",
    "floor": "tl.floor({0})",
    "ceil": "tl.ceil({0})",
    "trunc": "libdevice.trunc({0})",
    "round": "libdevice.rint({0})",
    "reciprocal": "numeric.reciprocal({0})",
    "sqrt": "numeric.square_root({0})",
    "rsqrt": "tl.rsqrt({0})",
    "exp": "tl.exp({0})",
    "exp2": "tl.exp2({0})",
    "expm1": "libdevice.expm1({0})",
    "log": "tl.log({0})",
    "log2": "tl.log2({0})",
    "log10": "libdevice.log10({0})",
    "log1p": "libdevice.log1p({0})",
    "sin": "tl.sin({0})",
    "cos": "tl.cos({0})",
    "tan": "libdevice.tan({0})",
    "atan": "libdevice.atan({0})",
    "sinh": "libdevice.sinh({0})",
    "cosh": "libdevice.cosh({0})",
    "tanh": "libdevice.tanh({0})",
    "erf": "tl.erf({0})",
    "sigmoid": "numeric.sigmoid({0})",
    "add": "{0} + {1}",
    "sub": "{0} - {1}",
    "mul": "{0} * {1}",
    "div": "numeric.divide({0}, {1})",
    "i:floordiv": "numeric.floor_divide({0}, {1})",
    "f:floordiv": "numeric.floor_divide_floats({0}, {1})",
    "i:truncdiv": "{0} // {1}",
    "f:truncdiv": "libdevice.trunc(numeric.divide({0}, {1}))",
    "i:remainder": "numeric.remainder({0}, {1})",
    "f:remainder": "numeric.remainder_floats({0}, {1})",
    "i:fmod": "{0} % {1}",
    "f:fmod": "libdevice.fmod({0}, {1})",
    "pow": "libdevice.pow({0}, {1})",
    "atan2": "libdevice.atan2({0}, {1})",
    "maximum": "numeric.maximum({0}, {1})",
    "minimum": "numeric.minimum({0}, {1})",
    "eq": "{0} == {1}",
    "ne": "{0} != {1}",
    "lt": "{0} < {1}",
    "le": "{0} <= {1}",
    "gt": "{0} > {1}",
    "ge": "{0} >= {1}",
    "isnan": "{0} != {0}",
    "isinf": "tl.abs({0}) == float('inf')",
    "and": "{0} & {1}",
    "or": "{0} | {1}",
    "xor": "{0} ^ {1}",
    "where": "tl.where({0}, {1}, {2})",
}


class Space(NamedTuple):
    """How loop variables are written.

    Attributes:
        axes: One expression per axis, broadcastable to the tile.
        groups: Which group each axis belongs to.
        inside: Per group, the mask of its indices that exist; `None` when all do.
        rank: Dims of a tile.
    """

    axes: tuple[str, ...]
    groups: tuple[int, ...]
    inside: tuple[str | None, ...]
    rank: int = 2


class Operands:
    """The tuple a generated function gets, as it grows: pointers and runtime integers, each once."""

    def __init__(self, form: Form) -> None:
        self._sizes = slot_sizes(form)
        self._types = {p.name: p.type for p in (*form.parameters, *form.results)}
        self._places: dict[str, int] = {}
        self._arguments: list[Argument] = []

    def slot(self, name: str) -> str:
        """Return the text of a slot's pointer."""
        return self._place(name, Slot(name, self._types[name].dtype))

    def dtype(self, name: str) -> str:
        """Return a slot's element type."""
        return self._types[name].dtype

    def span(self, name: str) -> int:
        """Return how many elements lie between a slot's first and last, at the task's sizes."""
        rank = len(self._types[name].shape)
        sizes = self._sizes
        return sum((sizes[f"{name}.size{i}"] - 1) * sizes[f"{name}.stride{i}"] for i in range(rank))

    def size(self, expression: Dim) -> str:
        """Return the text of a size: a literal, or an argument, promised divisible by 16 if it is so for the task."""
        if isinstance(expression, int):
            return str(expression)
        divisible = evaluate(expression, self._sizes) % 16 == 0
        return self._place(expression, SizeOf(expression, divisible))

    def extent(self, expression: Dim) -> str:
        """Return the text of a size of an outer axis: a literal, or an argument that promises nothing."""
        if isinstance(expression, int):
            return str(expression)
        return self._place(f"extent {expression}", SizeOf(expression))

    def other(self, argument: Slot) -> str:
        """Return the text of a pointer to scratch memory."""
        return self._place(argument.name, argument)

    def _place(self, key: str, argument: Argument) -> str:
        if key not in self._places:
            self._places[key] = len(self._arguments)
            self._arguments.append(argument)
        return f"operands[{self._places[key]}]"

    def arguments(self) -> tuple[Argument, ...]:
        """Return the tuple's items."""
        return tuple(self._arguments)


def number(value: bool | int | float) -> str:
    """Write a number so that Triton reads exactly it."""
    if isinstance(value, float) and not math.isfinite(value):
        return f"float('{value}')"
    return repr(value)


class Printer:
    """Prints nodes of one nest in one space.

    Args:
        nest: What to print.
        space: How its axes are written.
        operands: Where pointers come from.
        accumulators: Expression of every slot that is not memory (`acc0`).

    Attributes:
        depends: Per node, the groups of axes it varies over.
        names: Per node, the variable it is assigned to; a skeleton that prints a node twice renames it.
        eviction: What the cache is told about loads of rows: `evict_first`, `evict_last` or nothing.
    """

    def __init__(
        self, nest: LoopNest, space: Space, operands: Operands, accumulators: dict[str, str] | None = None
    ) -> None:
        self.nest = nest
        self.space = space
        self.operands = operands
        self.accumulators = accumulators or {}
        self.names = [f"v{position}" for position in range(len(nest.nodes))]
        self.eviction = ""
        self.depends = node_groups(nest, space, set(self.accumulators))

    def statement(self, position: int) -> str:
        """Print a node (not a reduction) as an assignment to its name."""
        return f"{self.names[position]} = {self._expression(self.nest.nodes[position])}"

    def _expression(self, node: Node) -> str:
        match node:
            case Load():
                return self._load(node)
            case Constant(value, dtype):
                shape = ", ".join(["1"] * self.space.rank)
                return f"tl.full([{shape}], {number(value)}, {DTYPES[dtype]})"
            case Index(strides, offset, dtype):
                return f"({self._linear(strides, offset)}).to({DTYPES[dtype]})"
            case Inside(bound):
                return self._bound(bound)
            case Op():
                return self._op(node)
            case Cast(value, dtype):
                source = self.names[value]
                return f"{source} != 0" if dtype == "bool" else f"{source}.to({DTYPES[dtype]})"
            case Reduce():
                raise TypeError("a reduction is the skeleton's to print")

    def _op(self, op: Op) -> str:
        kind = node_dtype(self.nest.nodes[op.args[0]])
        prefix = "f" if kind in _FLOATS else "i"
        if op.name == "not":
            operand = self.names[op.args[0]]
            return f"{operand} == 0" if kind == "bool" else f"~{operand}"
        template = _TEMPLATES.get(op.name) or _TEMPLATES.get(f"{prefix}:{op.name}")
        if template is None:
            raise KeyError(f"no Triton for {op.name} on {kind}")
        return template.format(*(self.names[a] for a in op.args))

    def _linear(self, strides: Iterable[Dim], offset: Dim, *, wide: bool = False) -> str:
        terms = []
        for axis, stride in zip(self.space.axes, strides, strict=True):
            if stride == 0:
                continue
            text = f"{axis}.to(tl.int64)" if wide else axis
            terms.append(text if stride == 1 else f"{text} * {self.operands.size(stride)}")
        if offset != 0 or not terms:
            terms.append(self.operands.size(offset))
        return " + ".join(terms)

    def _bound(self, bound: Bound) -> str:
        index = self._linear(bound.strides, bound.offset)
        return f"(({index}) >= {bound.low}) & (({index}) < {bound.high})"

    def _groups(self, strides: Iterable[Dim]) -> frozenset[int]:
        return frozenset(g for g, s in zip(self.space.groups, strides, strict=True) if s != 0)

    def _address(self, access: Access, gather: tuple[Gather, ...], extra: frozenset[int]) -> tuple[str, frozenset[int]]:
        """Return a pointer's text and the groups its shape covers; `extra` groups are made part of the shape."""
        groups = self._groups(access.strides).union(*(self.depends[g.node] for g in gather))
        parts = [self.operands.slot(access.slot)]
        large = self.operands.span(access.slot) >= 2**31
        for axis, stride, loop in zip(self.space.axes, access.strides, self.nest.axes, strict=True):
            if stride != 0:
                # 64 bits where the number of rows is open or the slot is large; columns stay narrow.
                text = f"{axis}.to(tl.int64)" if large or isinstance(loop.extent, str) else axis
                parts.append(text if stride == 1 else f"{text} * {self.operands.size(stride)}")
        if access.offset != 0:
            parts.append(self.operands.size(access.offset))
        parts.extend(
            f"tl.minimum(tl.maximum({self.names[g.node]}, 0), {g.size - 1}).to(tl.int64) * {g.stride}" for g in gather
        )
        for group in sorted(extra - groups):
            axis = self.space.axes[self.space.groups.index(group)]
            parts.append(f"{axis} * 0")
        return " + ".join(parts), groups | extra

    def _mask(self, groups: frozenset[int], bounds: tuple[Bound, ...]) -> str:
        parts = [f"({m})" for g, m in enumerate(self.space.inside) if g in groups and m is not None]
        parts.extend(f"({self._bound(b)})" for b in bounds)
        return " & ".join(parts)

    def _load(self, load: Load) -> str:
        if load.access.slot in self.accumulators:
            return self.accumulators[load.access.slot]
        needed = frozenset().union(*(self._groups(b.strides) for b in load.where))
        pointer, groups = self._address(load.access, load.gather, needed)
        mask = self._mask(groups, load.where)
        options = [f"mask={mask}", "other=0"] if mask else []
        if self.eviction and groups >= {0, 1} and (self.eviction != "evict_first" or self._is_read_once(load)):
            options.append(f"eviction_policy='{self.eviction}'")
        text = f"tl.load({', '.join((pointer, *options))})"
        if load.dtype == "bool":
            return f"{text} != 0"
        return text if groups else f"tl.full([{', '.join(['1'] * self.space.rank)}], 0, {DTYPES[load.dtype]}) + {text}"

    def _is_read_once(self, load: Load) -> bool:
        """Say whether no two rows read the same element."""
        return all(
            stride != 0 or axis.size == 1 for stride, axis in zip(load.access.strides, self.nest.axes, strict=True)
        )

    def store(self, store: Store, only: str = "") -> str:
        """Print a store, `only` where a condition holds."""
        # Where no row makes a difference to the address, the mask of the rows still lets one through; and a block of
        # one element needs a block of one pointer.
        pointer, groups = self._address(store.access, (), self.depends[store.value] | {0})
        mask = " & ".join(part for part in (self._mask(groups, ()), only) if part)
        value = f"{self.names[store.value]}.to({DTYPES[self.operands.dtype(store.access.slot)]})"
        return f"tl.store({pointer}, {value}, mask={mask})" if mask else f"tl.store({pointer}, {value})"


def node_dtype(node: Node) -> str:
    """Return a node's element type."""
    if isinstance(node, Reduce) and node.kind in {"argmax", "argmin"}:
        return "int64"
    return node.dtype


def node_groups(nest: LoopNest, space: Space, accumulators: set[str]) -> list[frozenset[int]]:
    """Return for every node the groups of axes it varies over; a reduction removes the last group."""
    everything = frozenset(space.groups)
    columns = {g for g, _ in zip(space.groups[::-1], range(nest.inner), strict=False)}
    result: list[frozenset[int]] = []

    def along(strides: Iterable[Dim]) -> frozenset[int]:
        return frozenset(g for g, s in zip(space.groups, strides, strict=True) if s != 0)

    for node in nest.nodes:
        found = frozenset().union(*(result[a] for a in arguments(node)))
        match node:
            case Load(access, _, where):
                found |= everything if access.slot in accumulators else along(access.strides)
                found = found.union(*(along(b.strides) for b in where))
            case Index(strides):
                found |= along(strides)
            case Inside(bound):
                found |= along(bound.strides)
            case Reduce():
                found -= columns
            case _:
                pass
        result.append(found)
    return result
