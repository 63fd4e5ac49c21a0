"""Prints the functions that `kernels/rows.py` calls: a nest over rows, whole, looped or split, or over flat elements.

Whole rows are held in registers. A loop reads the columns once per level of reductions (tune/loops/online.py): what a
reduction's result feeds is computed in a later pass, from loads that the cache then serves. A split row is shared by
several programs: one launch per level, each leaving partial results in scratch memory that the next one joins. A store
happens in the first pass that has its value.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from tune_model.runtime.expression import Dim, evaluate, product
from tune_model.runtime.kernel import Workspace
from tune_model.runtime.program import Form
from tune_model.runtime.replay import slot_sizes
from tune_model.tune.loops.ir import Axis, LoopNest, Node, Reduce, Store, arguments
from tune_model.tune.loops.online import Pair, find_pairs, levels
from tune_model.tune.triton.accumulate import (
    Counts,
    Tile,
    Unit,
    identity_of,
    join_first,
    join_second,
    leave,
    start,
    take,
    whole,
)
from tune_model.tune.triton.emit import DTYPES, Operands, Printer, Space
from tune_model.tune.triton.launch import Argument, Slot

__all__ = ["Generated", "Loop", "SplitLaunch", "pointwise_function", "row_function", "split_functions"]


class Generated(NamedTuple):
    """A generated function's text and the operands it takes.

    Attributes:
        source: Defines `body`.
        operands: The tuple of pointers and integers.
        extent: Rows, or elements, there are.
    """

    source: str
    operands: tuple[Argument, ...]
    extent: Dim


class SplitLaunch(NamedTuple):
    """One launch of a split row.

    Attributes:
        generated: Its function.
        splits: Programs per row: 1 where only row values are left to compute.
    """

    generated: Generated
    splits: int


class Loop(NamedTuple):
    """How a loop over columns is compiled.

    Attributes:
        stages: Loads run so many steps ahead; 1 leaves it to the hardware.
        unroll: Steps per iteration.
    """

    stages: int = 1
    unroll: int = 1

    def over(self, low: str, high: str) -> str:
        """Return the text of the loop's head."""
        options = "".join(
            f", {name}={value}"
            for name, value in (("num_stages", self.stages), ("loop_unroll_factor", self.unroll))
            if value > 1
        )
        return f"for start in tl.range({low}, {high}, BLOCK{options}):"


def pointwise_function(nest: LoopNest, form: Form) -> Generated:
    """Print a nest without columns over its flattened index."""
    operands = Operands(form)
    lines, axes = _unflatten("index", nest.axes, "i", operands)
    space = Space(axes, (0,) * len(axes), ("index < count",), rank=1)
    printer = Printer(nest, space, operands)
    lines += [printer.statement(n) for n in range(len(nest.nodes))]
    lines += [printer.store(store) for store in nest.stores]
    text = "@triton.jit\ndef body(index, count, operands):\n" + "".join(f"    {line}\n" for line in lines)
    return Generated(text, operands.arguments(), product(tuple(a.extent for a in nest.axes)))


def row_function(nest: LoopNest, form: Form, rows: int, block: int, loop: Loop | None = None) -> Generated:
    """Print a nest with columns for programs of `rows` rows and `block` columns at a time."""
    printer = _Rows(nest, form, rows, block, loop or Loop())
    return printer.whole() if block >= printer.width else printer.looped()


def split_functions(
    nest: LoopNest, form: Form, tile: tuple[int, int], splits: int, loop: Loop | None = None
) -> tuple[tuple[SplitLaunch, ...], tuple[Workspace, ...], int]:
    """Print a nest whose rows are shared by up to `splits` programs each.

    Args:
        nest: With columns.
        form: What it computes.
        tile: Rows and columns that a program holds at a time.
        splits: Programs per row; fewer where that leaves no program without columns.
        loop: How loops are compiled.

    Returns:
        The launches in order, the scratch memory between them, and how many columns each program runs over.
    """
    return _Split(nest, form, tile, splits, loop or Loop()).print()


def _unflatten(
    index: str, axes: tuple[Axis, ...], prefix: str, operands: Operands
) -> tuple[list[str], tuple[str, ...]]:
    """Write each axis's variable as a part of a row-major index; the outermost needs no remainder."""
    lines: list[str] = []
    names = []
    rest = index
    for place in range(len(axes) - 1, -1, -1):
        name = f"{prefix}{place}"
        if place == 0:
            lines.append(f"{name} = {rest}")
        else:
            size = operands.extent(axes[place].extent)
            lines.append(f"{name} = ({rest}) % {size}")
            lines.append(f"{prefix}_rest{place} = ({rest}) // {size}")
            rest = f"{prefix}_rest{place}"
        names.append(name)
    return lines, tuple(names[::-1])


class _Rows:
    """Prints one function over tiles of rows and columns."""

    def __init__(self, nest: LoopNest, form: Form, rows: int, block: int, loop: Loop) -> None:
        self.nest = nest
        self.tile = Tile(nest, rows)
        self.loop = loop
        self.operands = Operands(form)
        split = len(nest.axes) - nest.inner
        self.outer, self.inner = nest.axes[:split], nest.axes[split:]
        self.width = evaluate(product(tuple(a.extent for a in self.inner)), slot_sizes(form))
        self.count = product(tuple(a.extent for a in self.outer))
        self.row_lines, row_names = _unflatten("rows", self.outer, "r", self.operands)
        self.column_lines, column_names = _unflatten("columns", self.inner, "c", self.operands)
        inside = (
            None if rows == 1 else "rows < row_count",
            None if self.width % block == 0 else f"columns < {self.width}",
        )
        groups = (0,) * split + (1,) * nest.inner
        self.space = Space((*row_names, *column_names), groups, inside, self.tile.rank)
        self.printer = Printer(nest, self.space, self.operands)
        self.pairs: Mapping[int, Pair] = find_pairs(nest)
        self.levels = levels(nest, self.pairs)

    def whole(self) -> Generated:
        """Hold rows whole; reductions take what is there, one after the other."""
        lines = [f"columns = {self.tile.along('BLOCK')}", *self.column_lines]
        names = self.printer.names
        for position, node in enumerate(self.nest.nodes):
            if isinstance(node, Reduce):
                lines += whole(self.tile, position, names[position], names[node.value], self.space.inside[1])
            else:
                lines.append(self.printer.statement(position))
        lines += [self.printer.store(store) for store in self.nest.stores]
        return self.generated(lines, "BLOCK: tl.constexpr")

    def looped(self) -> Generated:
        """Read the columns once per level."""
        lines: list[str] = []
        last = max(self._passes(), default=0)
        for level in range(max(self.levels) + 1):
            lines += self._row_values(level)
            stores = [s for s in self.nest.stores if self.levels[s.value] == level]
            lines += [self.printer.store(s) for s in stores if not self.per_column(s)]
            # What is read again should stay in the cache; what is read for the last time need not.
            self.printer.eviction = "" if last == 0 else "evict_first" if level == last else "evict_last"
            lines += self.columns_pass(level, ("0", str(self.width)))
        return self.generated(lines, "BLOCK: tl.constexpr")

    def _passes(self) -> list[int]:
        """Return the levels at which the columns are read."""
        made = {self.levels[n] - 1 for n, node in enumerate(self.nest.nodes) if isinstance(node, Reduce)}
        return sorted(made | {self.levels[s.value] for s in self.nest.stores if self.per_column(s)})

    def _row_values(self, level: int) -> list[str]:
        """Print the row values that are known before the pass of a level, from the accumulators of the one before."""
        lines: list[str] = []
        for position, node in enumerate(self.nest.nodes):
            if self.levels[position] != level or 1 in self.printer.depends[position]:
                continue
            if isinstance(node, Reduce):
                lines += self.join(position, self.lane_counts(str(self.width)))
            else:
                lines.append(self.printer.statement(position))
        return lines

    def join(self, position: int, counts: Counts) -> list[str]:
        """Print a reduction's value from a tile of partial results."""
        names = self.printer.names
        if position in self.pairs:
            pair = self.pairs[position]
            return join_second(self.tile, pair, names[position], names[pair.center], counts)
        return join_first(self.tile, self.unit(position), names[position])

    def unit(self, position: int) -> Unit:
        pair = next((p for p in self.pairs.values() if p.first == position), None)
        return Unit(position, pair)

    def units(self, level: int) -> list[Unit]:
        """Return what the pass of a level accumulates."""
        return [
            self.unit(position)
            for position, node in enumerate(self.nest.nodes)
            if isinstance(node, Reduce) and position not in self.pairs and self.levels[position] == level + 1
        ]

    def per_column(self, store: Store) -> bool:
        """Say whether a store writes every column."""
        return any(s != 0 for s in store.access.strides[len(self.outer) :])

    def columns_pass(self, level: int, ends: tuple[str, str]) -> list[str]:
        """Print one pass over the columns: everything its reductions and stores need, loads included."""
        units = self.units(level)
        stores = [s for s in self.nest.stores if self.levels[s.value] == level and self.per_column(s)]
        if not units and not stores:
            return []
        low, high = ends
        lines: list[str] = []
        for unit in units:
            lines += start(self.tile, unit, f"{low} + {self.tile.along('BLOCK')}")
        needed = _needed(self.nest, [self.value(u) for u in units] + [s.value for s in stores])
        inside = [f"columns = start + {self.tile.along('BLOCK')}", *self.column_lines]
        names = list(self.printer.names)
        for position in needed:
            if 1 in self.printer.depends[position]:
                self.printer.names[position] = f"p{level}_{position}"
                inside.append(self.printer.statement(position))
        for unit in units:
            inside += take(self.tile, unit, self.printer.names[self.value(unit)], self.space.inside[1])
        inside += [self.printer.store(s) for s in stores]
        self.printer.names = names
        return [*lines, self.loop.over(low, high), *(f"    {line}" for line in inside)]

    def lane_counts(self, columns: str) -> Counts:
        """Return how many of so many columns each lane of a loop sees."""
        return Counts(f"({columns} - {self.tile.along('BLOCK')} + (BLOCK - 1)) // BLOCK", columns)

    def value(self, unit: Unit) -> int:
        """Return the node that a unit accumulates."""
        node = self.nest.nodes[unit.position]
        return arguments(node)[0]

    def generated(self, lines: Sequence[str], parameters: str) -> Generated:
        """Return the function with these lines after those that name rows."""
        text = f"@triton.jit\ndef body(rows, row_count, operands, {parameters}):\n"
        text += "".join(f"    {line}\n" for line in (*self.row_lines, *lines))
        return Generated(text, self.operands.arguments(), self.count)


class _Split:
    """Prints the launches of a nest whose rows are shared."""

    def __init__(self, nest: LoopNest, form: Form, tile: tuple[int, int], splits: int, loop: Loop) -> None:
        self.nest = nest
        self.form = form
        self.tile = tile
        self.loop = loop
        first = _Rows(nest, form, *tile, loop)
        blocks = -(-first.width // tile[1])
        self.span = -(-blocks // splits) * tile[1]
        self.splits = -(-first.width // self.span)
        self.count = first.count
        self.scratch: dict[str, Workspace] = {}
        """By the variable of the partial result that it holds."""

    def print(self) -> tuple[tuple[SplitLaunch, ...], tuple[Workspace, ...], int]:
        passes = max(_Rows(self.nest, self.form, *self.tile, self.loop).levels) + 1
        launches = [launch for level in range(passes) if (launch := self._launch(level, passes)) is not None]
        return tuple(launches), tuple(self.scratch.values()), self.span

    def _launch(self, level: int, passes: int) -> SplitLaunch | None:
        rows = _Rows(self.nest, self.form, *self.tile, self.loop)
        units = rows.units(level)
        stores = [s for s in self.nest.stores if rows.levels[s.value] == level]
        if not units and not stores:
            return None
        columns = [s for s in stores if rows.per_column(s)]
        splits = self.splits if units or columns else 1
        lines = self._joined(rows, level, stores)
        whole_row = "" if splits == 1 else " & (split == 0)"
        for store in stores:
            if not rows.per_column(store):
                lines.append(rows.printer.store(store, f"(rows < row_count){whole_row}"))
        if units or columns:
            lines.append(f"high = tl.minimum(low + SPAN, {rows.width})")
            rows.printer.eviction = "evict_last" if level + 1 < passes else "evict_first"
            lines += rows.columns_pass(level, ("low", "high"))
        for unit in units:
            lines += self._left(rows, unit)
        generated = rows.generated(lines, "low, split, SPAN: tl.constexpr, BLOCK: tl.constexpr")
        return SplitLaunch(generated, splits)

    def _joined(self, rows: _Rows, level: int, stores: Sequence[Store]) -> list[str]:
        """Print the row values that a launch needs, joining what earlier ones left."""
        roots = [rows.value(u) for u in rows.units(level)] + [s.value for s in stores]
        needed = _needed(self.nest, roots, through=True)
        lines: list[str] = []
        loaded: set[int] = set()
        parts = f"tl.minimum(tl.maximum({rows.width} - parts * SPAN, 0), SPAN)"
        for position in needed:
            node = self.nest.nodes[position]
            if 1 in rows.printer.depends[position] or rows.levels[position] > level:
                continue
            if isinstance(node, Reduce):
                unit = rows.unit(rows.pairs[position].first if position in rows.pairs else position)
                if unit.position not in loaded:
                    loaded.add(unit.position)
                    lines += self._loads(rows, unit)
                lines += rows.join(position, Counts(parts, str(rows.width)))
            else:
                lines.append(rows.printer.statement(position))
        if not loaded:
            return lines
        held = 1 << max(0, self.splits - 1).bit_length()
        return [f"parts = {rows.tile.along(str(held))}", *lines]

    def _loads(self, rows: _Rows, unit: Unit) -> list[str]:
        """Print reading the partial results of all splits of a row."""
        node = self.nest.nodes[unit.position]
        kind = node.kind if isinstance(node, Reduce) else "sum"
        lines = []
        inside = f"(parts < {self.splits}) & (rows < row_count)"
        for number, field in enumerate(unit.fields(self.nest)):
            other = identity_of(kind, field.dtype) if number == 0 else "0" if unit.pair is not None else str(2**31 - 1)
            place = f"{self._scratch(rows, field.name, field.dtype)} + rows.to(tl.int64) * {self.splits} + parts"
            lines.append(f"{field.name} = tl.load({place}, mask={inside}, other={other})")
        return lines

    def _left(self, rows: _Rows, unit: Unit) -> list[str]:
        """Print leaving the partial results of this program."""
        lines, made = leave(rows.tile, unit, rows.lane_counts("(high - low)"))
        for name, field in zip(made, unit.fields(self.nest), strict=True):
            place = f"{self._scratch(rows, field.name, field.dtype)} + rows.to(tl.int64) * {self.splits} + split"
            lines.append(f"tl.store({place}, {name}.to({DTYPES[field.dtype]}), mask=rows < row_count)")
        return lines

    def _scratch(self, rows: _Rows, name: str, dtype: str) -> str:
        if name not in self.scratch:
            size = product((self.count, self.splits))
            self.scratch[name] = Workspace(f"ws{len(self.scratch)}", dtype, size)
        return rows.operands.other(Slot(self.scratch[name].name, dtype))


def _needed(nest: LoopNest, roots: Sequence[int], *, through: bool = False) -> list[int]:
    """Return the nodes that roots are computed from, in order; what lies behind a reduction only if `through`.

    The reductions themselves are among them.
    """
    found: set[int] = set()
    stack = list(roots)
    while stack:
        position = stack.pop()
        if position in found:
            continue
        found.add(position)
        node: Node = nest.nodes[position]
        if through or not isinstance(node, Reduce):
            stack.extend(arguments(node))
    return sorted(found)
