"""Printing a stretch of columns: vectors several at a time, a tail, and the accumulators of reductions."""

import itertools
from typing import Final

import msgspec

from tune_model.runtime.expression import product
from tune_model.tune.cpp.numbers import literal, working
from tune_model.tune.cpp.scope import Columns, Facts, Scope
from tune_model.tune.loops.ir import Inside, Load, Reduce, Store

__all__ = ["ColumnPrinter", "Shape", "Work"]

LANES: Final = "L"
MOST_LANES: Final = 16
_SUM_BLOCK: Final = 4096
"""Longest run of columns summed into one set of accumulators; longer rows add up block sums, as ATen's cascades do."""


class Shape(msgspec.Struct, frozen=True):
    """Choices that the numbers do not depend on (beyond the order of sums).

    Attributes:
        unroll: Vectors per step.
        keep: What passes after the first read from a buffer instead of computing it again: `none`, what is `costly`,
            or `all`.
        grain: Least number of elements that is worth a thread.
        chunks: Parts of a row that threads share; 1 where each thread has rows of its own.
    """

    unroll: int = 2
    keep: str = "costly"
    grain: int = 16384
    chunks: int = 1


class Work(msgspec.Struct, frozen=True):
    """What one pass does at each column.

    Attributes:
        reduces: Reductions to accumulate.
        stores: Positions of stores.
        kept: Values to read from buffers, and the buffers' names.
        keeps: Values to write to their buffers.
    """

    reduces: tuple[int, ...] = ()
    stores: tuple[int, ...] = ()
    kept: dict[int, str] = {}
    keeps: tuple[int, ...] = ()


class ColumnPrinter:
    """Prints loops over the last axis.

    Args:
        facts: Of the kernel.
        shape: Choices.
        buffers: Names of the buffers of kept values.
    """

    def __init__(self, facts: Facts, shape: Shape, buffers: dict[int, str]) -> None:
        self.facts = facts
        self.nest = facts.nest
        self.column = facts.column
        self.shape = shape
        self.buffers = buffers
        self._rows = len(facts.nest.axes) - max(facts.nest.inner, 1)

    def cuts(self) -> set[int]:
        """Return the columns at which a piece of a concatenation begins or ends."""
        width, cuts = self.nest.axes[-1].size, set[int]()
        for n in self.nest.nodes:
            bounds = n.where if isinstance(n, Load) else (n.bound,) if isinstance(n, Inside) else ()
            for b in bounds:
                if b.strides[self.column] == 1 and not any(b.strides[: self.column]):
                    cuts |= {c for c in (b.low - b.offset, b.high - b.offset) if 0 < c < width}
        return cuts

    def stretches(self, row: Scope, work: Work) -> list[str]:
        """Print a pass over all columns, cut where pieces of concatenations meet; row values go into `row`."""
        edges = sorted({0, self.nest.axes[-1].size} | self.cuts())
        lines: list[str] = []
        for low, high in itertools.pairwise(edges):
            lines += self.stretch(row, work, (str(low), str(high)), (low, high))
        return lines

    def stretch(self, row: Scope, work: Work, ends: tuple[str, str], known: tuple[int, int] | None) -> list[str]:
        """Print a pass over columns `ends`.

        Args:
            row: Where what does not vary along columns is printed.
            work: What to do at each column.
            ends: C++ of the first column and of the one after the last.
            known: The same as numbers, where they are known.
        """
        low, high = ends
        reach = known or (0, None)
        block, unroll = self._block_of(work, known), self.shape.unroll
        lines = [f"{{ int64_t c = {low};"]
        stop = high
        if block:
            stop = "stop"
            lines.append(
                f"while (c + L <= {high}) {{ const int64_t stop = c + {block} < {high} ? c + {block} : {high};"
            )
        if unroll > 1:
            lines.append(f"for (; c + {unroll} * L <= {stop}; c += {unroll} * L) {{")
            for u in range(unroll):
                lines += self._vector(row, work, Columns(f"(c + {u} * L)" if u else "c", LANES, *reach), u)
            lines.append("}")
        lines.append(f"for (; c + L <= {stop}; c += L)")
        lines += self._vector(row, work, Columns("c", LANES, *reach), 0)
        if block:
            for n in self._sums(work):
                lines += [f"t{n}_{u} += s{n}_{u}; s{n}_{u} = V<{self._acc(n)}>{{}};" for u in range(unroll)]
            lines.append("}")
        if known is None or (known[1] - known[0]) % MOST_LANES:
            lines += [f"if (c < {high}) {{ const int n = int({high} - c);"]
            lines += [*self._vector(row, work, Columns("c", "n", *reach), 0), "}"]
        return [*lines, "}"]

    def _block_of(self, work: Work, known: tuple[int, int] | None) -> int:
        """Return the length of a block of columns whose sums are added up; 0 for one block."""
        if known is None or known[1] - known[0] <= _SUM_BLOCK or not self._sums(work):
            return 0
        return _SUM_BLOCK

    def _sums(self, work: Work) -> list[int]:
        return [n for n in work.reduces if self._reduce(n).kind == "sum" and self._reduce(n).dtype.startswith("float")]

    def _reduce(self, n: int) -> Reduce:
        node = self.nest.nodes[n]
        assert isinstance(node, Reduce)  # noqa: S101 - passes list reductions only
        return node

    def _acc(self, n: int) -> str:
        node = self._reduce(n)
        return working(self.nest.nodes[node.value].dtype if node.kind in {"argmax", "argmin"} else node.dtype)

    def _vector(self, row: Scope, work: Work, columns: Columns, u: int) -> list[str]:
        scope = Scope(self.facts, row, columns, work.kept)
        for n in work.keeps:
            value = scope.vector(n)
            pointer = f"{self.buffers[n]} + {columns.at}"
            scope.lines.append(f"store({pointer}, {value});" if columns.full else f"store_part({pointer}, {value}, n);")
        for n in work.reduces:
            scope.lines.append(self._accumulate(scope, n, columns, u))
        for k in work.stores:
            scope.lines.append(self._store(scope, self.nest.stores[k], columns))
        return ["{", *scope.lines, "}"]

    def _store(self, scope: Scope, store: Store, columns: Columns) -> str:
        value = scope.vector(store.value)
        if self.nest.nodes[store.value].dtype == "bool":
            value = f"from_mask<uint8_t>({value})"
        stride = store.access.strides[self.column]
        pointer = f"{store.access.slot} + {scope.place(store.access.strides, store.access.offset, columns=True)}"
        if stride != 1:
            return f"store_strided({pointer}, {self.facts.size(stride)}, {value}, {columns.lanes});"
        return f"store({pointer}, {value});" if columns.full else f"store_part({pointer}, {value}, n);"

    def _identity(self, n: int) -> str:
        node = self._reduce(n)
        dtype = node.dtype
        match node.kind:
            case "sum":
                return literal(0, dtype)
            case "prod":
                return literal(1, dtype)
            case "any" | "all":
                return literal(node.kind == "all", "bool")
            case _:
                return _extreme(dtype, lowest=node.kind == "max")

    def declare(self, n: int) -> list[str]:
        """Print a reduction's accumulators with its identity in them."""
        node, kind = self._reduce(n), self._acc(n)
        unroll = range(self.shape.unroll)
        if node.kind in {"argmax", "argmin"}:
            return [f"Best<{kind}> s{n}_{u}{{V<{kind}>{{}}, splat(NO_COLUMN)}};" for u in unroll]
        lines = [f"V<{kind}> s{n}_{u} = splat<{kind}>({self._identity(n)});" for u in unroll]
        if node.kind == "sum" and node.dtype.startswith("float"):
            lines += [f"V<{kind}> t{n}_{u} = V<{kind}>{{}};" for u in unroll]
        return lines

    def _accumulate(self, scope: Scope, n: int, columns: Columns, u: int) -> str:
        node = self._reduce(n)
        name, value = f"s{n}_{u}", scope.vector(node.value)
        if node.kind in {"argmax", "argmin"}:
            at = columns.at
            for k in range(self._rows, self.column):
                inside = product(tuple(a.size for a in self.nest.axes[k + 1 :]))
                at = f"i{k} * {inside} + {at}"
            valid = "splat(int32_t(-1))" if columns.full else "first_lanes(n)"
            return f"better<{_true(node.kind == 'argmax')}>({name}, {value}, iota() + int32_t({at}), {valid});"
        if not columns.full:
            value = f"op_where(first_lanes(n), {value}, splat<{self._acc(n)}>({self._identity(n)}))"
        return f"{name} = {_combine(node.kind, name, value)};"

    def held(self, n: int) -> str:
        """Return the C++ type of a reduction's accumulator."""
        kind = self._acc(n)
        return f"Best<{kind}>" if self._reduce(n).kind in {"argmax", "argmin"} else f"V<{kind}>"

    def _merge(self, n: int, into: str, other: str) -> str:
        """Print taking one accumulator into another."""
        node = self._reduce(n)
        if node.kind in {"argmax", "argmin"}:
            valid = f"~as_mask({other}.column == NO_COLUMN)"
            return f"better<{_true(node.kind == 'argmax')}>({into}, {other}.value, {other}.column, {valid});"
        return f"{into} = {_combine(node.kind, into, other)};"

    def merged(self, n: int) -> list[str]:
        """Print what makes one accumulator, `s{n}_0`, of all of a reduction's."""
        node = self._reduce(n)
        others = [f"s{n}_{u}" for u in range(1, self.shape.unroll)]
        if node.kind == "sum" and node.dtype.startswith("float"):
            others += [f"t{n}_{u}" for u in range(self.shape.unroll)]
        return [self._merge(n, f"s{n}_0", other) for other in others]

    def joined(self, n: int, parts: str, count: int) -> list[str]:
        """Print what makes one accumulator, `s{n}_0`, of the `count` that lie at `parts`."""
        return [
            f"{self.held(n)} s{n}_0 = {parts}[0];",
            f"for (int part = 1; part < {count}; ++part) {{ {self._merge(n, f's{n}_0', f'{parts}[part]')} }}",
        ]

    def finish(self, n: int) -> str:
        """Print what makes one number, `v{n}`, of a reduction's one accumulator."""
        node, kind = self._reduce(n), self._acc(n)
        if node.kind in {"argmax", "argmin"}:
            return f"const int64_t v{n} = best_column<{_true(node.kind == 'argmax')}>(s{n}_0);"
        pair = f"[](V<{kind}> x, V<{kind}> y) {{ return {_combine(node.kind, 'x', 'y')}; }}"
        return f"const {kind} v{n} = fold<{kind}>(s{n}_0, {pair});"


def _true(value: bool) -> str:
    return "true" if value else "false"


def _combine(kind: str, x: str, y: str) -> str:
    match kind:
        case "sum":
            return f"{x} + {y}"
        case "prod":
            return f"({x}) * ({y})"
        case "any":
            return f"({x}) | ({y})"
        case "all":
            return f"({x}) & ({y})"
        case _:
            return f"op_{kind}imum({x}, {y})"


def _extreme(dtype: str, *, lowest: bool) -> str:
    if dtype.startswith("float"):
        return literal(float("-inf") if lowest else float("inf"), dtype)
    bits = 8 if dtype == "uint8" else int(dtype.removeprefix("int"))
    if dtype == "uint8":
        return literal(0 if lowest else 255, dtype)
    return literal(-(2 ** (bits - 1)) if lowest else 2 ** (bits - 1) - 1, dtype)
