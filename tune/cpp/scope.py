"""Printing nodes on demand: one number for a row value, a vector for a value that varies along columns.

A `Scope` is a stretch of straight code: what it needs is printed once, operands first, so what no root needs is never
printed.
"""

from collections.abc import Callable, Mapping, Sequence

import msgspec

from tune_model.runtime.expression import Dim
from tune_model.tune.cpp.numbers import convert, literal, storage, working
from tune_model.tune.loops.ir import Bound, Cast, Constant, Index, Inside, Load, LoopNest, Op, Reduce

__all__ = ["Columns", "Facts", "Scope"]


class Facts(msgspec.Struct, frozen=True):
    """What all scopes of a kernel share.

    Attributes:
        nest: What is printed.
        varies: For each node, whether it has one value per column.
        column: Which axis the lanes run along.
        size: Prints a `Dim`.
    """

    nest: LoopNest
    varies: tuple[bool, ...]
    column: int
    size: Callable[[Dim], str]


class Columns(msgspec.Struct, frozen=True):
    """Where in the columns a scope is.

    Attributes:
        at: C++ of the first lane's column.
        lanes: C++ of how many lanes are valid; `L` for all.
        low: Columns of the whole stretch are at least this,
        high: and below this; `None` when only the running kernel knows.
    """

    at: str
    lanes: str
    low: int
    high: int | None

    @property
    def full(self) -> bool:
        """Whether all lanes are valid."""
        return self.lanes == "L"


class Scope:
    """Prints nodes into a list of lines.

    Args:
        facts: Of the kernel.
        row: The scope of the row around a scope inside its columns; prints what does not vary along them.
        columns: Where, for a scope inside the columns.
        kept: Nodes that are read from a buffer, and its name.
    """

    def __init__(
        self,
        facts: Facts,
        row: "Scope | None" = None,
        columns: Columns | None = None,
        kept: Mapping[int, str] | None = None,
    ) -> None:
        self.facts = facts
        self.row = row
        self.columns = columns
        self.kept = kept or {}
        self.names: dict[int, str] = {}
        self.lines: list[str] = []
        self._vectors: dict[int, str] = {}

    def name(self, node: int) -> str:
        """Return the variable that holds a node, printing it if need be."""
        if self.row is not None and not self.facts.varies[node]:
            return self.row.name(node)
        if node not in self.names:
            text = self._kept(node) or self._print(node)
            self.names[node] = f"v{node}"
            self.lines.append(f"const auto v{node} = {text};")
        return self.names[node]

    def vector(self, node: int) -> str:
        """Return a node as lanes."""
        if self.facts.varies[node] and self._single_in_stretch(node) is None:
            return self.name(node)
        if self.row is not None and not self.facts.varies[node]:
            return self.row.vector(node)
        if node not in self._vectors:
            dtype = self.facts.nest.nodes[node].dtype
            self._vectors[node] = f"w{node}"
            self.lines.append(f"const V<{working(dtype)}> w{node} = splat<{working(dtype)}>({self.name(node)});")
        return self._vectors[node]

    def _kept(self, node: int) -> str | None:
        if node not in self.kept or self.columns is None:
            return None
        pointer = f"{self.kept[node]} + {self.columns.at}"
        return f"load({pointer})" if self.columns.full else f"load_part({pointer}, {self.columns.lanes})"

    def _lanes(self, node: int) -> bool:
        return self.facts.varies[node] and self.columns is not None and self._single_in_stretch(node) is None

    def _single_in_stretch(self, node: int) -> bool | None:
        """Return the truth of a piece test that holds, or fails, for the whole stretch of columns."""
        kind = self.facts.nest.nodes[node]
        return self._known(kind.bound) if isinstance(kind, Inside) else None

    def _known(self, bound: Bound) -> bool | None:
        columns = self.columns
        if columns is None or columns.high is None:
            return None
        own = bound.strides[self.facts.column]
        if own == 0 or any(s for k, s in enumerate(bound.strides) if k != self.facts.column):
            return None
        ends = [bound.offset + own * columns.low, bound.offset + own * (columns.high - 1)]
        if bound.low <= min(ends) and max(ends) < bound.high:
            return True
        return False if max(ends) < bound.low or min(ends) >= bound.high else None

    def _print(self, node: int) -> str:
        kind = self.facts.nest.nodes[node]
        match kind:
            case Load():
                return self._load(kind, lanes=self._lanes(node))
            case Constant(value, dtype):
                return literal(value, dtype)
            case Index():
                return self._index(kind, lanes=self._lanes(node))
            case Inside(bound, _):
                known = self._known(bound)
                return (
                    self._inside(bound, lanes=True) if known is None and self._lanes(node) else self._test(bound, known)
                )
            case Cast(value, dtype):
                lanes = self._lanes(node)
                operand = self.vector(value) if lanes else self.name(value)
                return convert(operand, self.facts.nest.nodes[value].dtype, dtype, lanes=lanes)
            case Op():
                return self._op(node, kind)
            case Reduce():
                raise AssertionError("a reduction is known before it is read")

    def _test(self, bound: Bound, known: bool | None) -> str:
        if known is not None:
            return literal(known, "bool")
        return self._inside(bound, lanes=False)

    def _op(self, node: int, op: Op) -> str:
        lanes = self._lanes(node)
        if op.name == "where":
            known = self._single_in_stretch(op.args[0])
            if known is not None:
                chosen = op.args[1 if known else 2]
                return self.vector(chosen) if lanes else self.name(chosen)
        operands = [self.vector(a) if lanes else self.name(a) for a in op.args]
        first = self.facts.nest.nodes[op.args[-1]].dtype
        name = op.name
        if first == "bool" and name in {"lt", "le", "gt", "ge"}:  # true is -1
            name = {"lt": "gt", "le": "ge", "gt": "lt", "ge": "le"}[name]
        if name in {"floordiv", "truncdiv", "fmod", "remainder", "pow", "atan2"}:
            return f"{name}_{'lanes' if lanes else 'one'}({', '.join(operands)})"
        text = f"op_{name}({', '.join(operands)})"
        # C++ widens small integers in arithmetic.
        return (
            text
            if lanes or working(op.dtype) not in {"int16_t", "int8_t", "uint8_t"}
            else f"{working(op.dtype)}({text})"
        )

    def place(self, strides: Sequence[Dim], offset: Dim, *, columns: bool) -> str:
        """Print an address or index at the first lane."""
        terms = [] if offset == 0 else [self.facts.size(offset)]
        for k, stride in enumerate(strides):
            if stride == 0 or (k == self.facts.column and not columns):
                continue
            place = f"i{k}"
            if k == self.facts.column:
                if self.columns is None:
                    raise AssertionError("a row value does not vary along columns")
                place = self.columns.at
            terms.append(place if stride == 1 else f"{place} * {self.facts.size(stride)}")
        return " + ".join(terms) or "0"

    def _index(self, node: Index, *, lanes: bool) -> str:
        place = self.place(node.strides, node.offset, columns=lanes)
        if not lanes:
            return f"{working(node.dtype)}({place})"
        step = node.strides[self.facts.column]
        return f"convert_lanes<{working(node.dtype)}>(int64_t({place}) + convert_lanes<int64_t>(iota()) * {step})"

    def _inside(self, bound: Bound, *, lanes: bool) -> str:
        place = self.place(bound.strides, bound.offset, columns=lanes)
        if not lanes:
            return f"inside({place}, {bound.low}, {bound.high})"
        return f"inside({place}, {bound.strides[self.facts.column]}, {bound.low}, {bound.high})"

    def _load(self, node: Load, *, lanes: bool) -> str:
        tests = [b for b in node.where if self._known(b) is not True]
        if any(self._known(b) is False for b in tests):
            zero = f"{working(node.dtype)}(0)"
            return f"splat<{working(node.dtype)}>({zero})" if lanes else zero
        place = self.place(node.access.strides, node.access.offset, columns=lanes)
        text = self._lanes_from(node, place, tests) if lanes else self._one_from(node, place, tests)
        if node.dtype != "bool":
            return text
        return f"mask_lanes({text})" if lanes else f"as_mask({text} != 0)"

    def _one_from(self, node: Load, place: str, tests: Sequence[Bound]) -> str:
        for g in node.gather:
            place += f" + clamped({self.name(g.node)}, {g.size}) * {g.stride}"
        text = f"{node.access.slot}[{place}]"
        if tests:
            condition = " & ".join(self._inside(b, lanes=False) for b in tests)
            text = f"({condition}) ? {text} : {storage(node.dtype)}(0)"
        return text

    def _lanes_from(self, node: Load, place: str, tests: Sequence[Bound]) -> str:
        assert self.columns is not None  # noqa: S101 - lanes exist only in columns
        stride = node.access.strides[self.facts.column]
        moving = [g for g in node.gather if self.facts.varies[g.node]]
        for g in node.gather:
            if g not in moving:
                place += f" + clamped({self.name(g.node)}, {g.size}) * {g.stride}"
        pointer = f"{node.access.slot} + {place}"
        count = self.columns.lanes
        mask = " & ".join(
            self._inside(b, lanes=True) if b.strides[self.facts.column] else f"splat({self._inside(b, lanes=False)})"
            for b in tests
        )
        if moving:
            extra = " + ".join(f"clamped({self.name(g.node)}, {g.size}) * {g.stride}" for g in moving)
            return f"gather({pointer}, {self.facts.size(stride)}, {extra}, {mask or 'splat(int32_t(-1))'}, {count})"
        if mask:
            return f"load_masked({pointer}, {self.facts.size(stride)}, {mask}, {count})"
        if stride == 0:
            return f"splat<{storage(node.dtype)}>(*({pointer}))"
        if stride != 1:
            return f"load_strided({pointer}, {self.facts.size(stride)}, {count})"
        return f"load({pointer})" if self.columns.full else f"load_part({pointer}, {count})"
