"""Prints the launches of a nest whose rows several programs share.

One launch per level of reductions: each program runs over its span of columns and leaves partial results in scratch
memory; the next launch joins them. Where only row values are left to compute, that may also be done by the last of a
row's programs to arrive, which saves the launch.
"""

from collections.abc import Sequence
from typing import Final, NamedTuple

from tune_model.runtime.expression import product
from tune_model.runtime.kernel import Workspace
from tune_model.runtime.program import Form
from tune_model.tune.loops.ir import LoopNest, Reduce, Store
from tune_model.tune.triton.accumulate import Counts, Unit, identity_of, leave
from tune_model.tune.triton.emit import DTYPES, Operands
from tune_model.tune.triton.launch import Slot
from tune_model.tune.triton.row_source import Generated, Loop, RowPrinter, needed_for

__all__ = ["SplitLaunch", "SplitPlan", "ends_with_row_values", "split_functions"]

_COUNTERS: Final = "counters"


class SplitLaunch(NamedTuple):
    """One launch.

    Attributes:
        generated: Its function.
        splits: Programs per row: 1 where only row values are left to compute.
    """

    generated: Generated
    splits: int


class SplitPlan(NamedTuple):
    """All launches.

    Attributes:
        launches: In order.
        workspaces: Scratch memory between them.
        span: Columns that each program runs over.
    """

    launches: tuple[SplitLaunch, ...]
    workspaces: tuple[Workspace, ...]
    span: int


def ends_with_row_values(nest: LoopNest, form: Form) -> bool:
    """Say whether nothing is written per column after the last reduction."""
    rows = RowPrinter(nest, form, 1, 1, Loop())
    last = max(rows.levels)
    return last > 0 and not any(rows.levels[s.value] == last and rows.per_column(s) for s in nest.stores)


def split_functions(
    nest: LoopNest,
    form: Form,
    tile: tuple[int, int],
    splits: int,
    loop: Loop | None = None,
    *,
    last_joins: bool = False,
) -> SplitPlan:
    """Print a nest whose rows are shared by up to `splits` programs each.

    Args:
        nest: With columns.
        form: What it computes.
        tile: Rows and columns that a program holds at a time.
        splits: Programs per row; fewer where that leaves no program without columns.
        loop: How loops are compiled.
        last_joins: A row's last program computes the row values that a last launch would; only for what
            `ends_with_row_values`.
    """
    return _Split(nest, form, tile, splits, loop or Loop()).print(last_joins=last_joins)


class _Split:
    def __init__(self, nest: LoopNest, form: Form, tile: tuple[int, int], splits: int, loop: Loop) -> None:
        self.nest = nest
        self.form = form
        self.tile = tile
        self.loop = loop
        first = self._rows()
        blocks = -(-first.width // tile[1])
        self.span = -(-blocks // splits) * tile[1]
        self.splits = -(-first.width // self.span)
        self.count = first.count
        self.passes = max(first.levels) + 1
        self.scratch: dict[str, Workspace] = {}
        """By the variable of the partial result that it holds."""

    def _rows(self, operands: Operands | None = None) -> RowPrinter:
        return RowPrinter(self.nest, self.form, *self.tile, self.loop, operands)

    def print(self, *, last_joins: bool) -> SplitPlan:
        ahead = self.passes - 1 if last_joins else self.passes
        launches = [self._launch(level, joined=last_joins and level == ahead - 1) for level in range(ahead)]
        made = tuple(launch for launch in launches if launch is not None)
        return SplitPlan(made, tuple(self.scratch.values()), self.span)

    def _launch(self, level: int, *, joined: bool) -> SplitLaunch | None:
        rows = self._rows()
        units = rows.units(level)
        stores = [s for s in self.nest.stores if rows.levels[s.value] == level]
        if not units and not stores:
            return None
        columns = [s for s in stores if rows.per_column(s)]
        splits = self.splits if units or columns else 1
        lines = self._row_values(rows, level, "split == 0" if splits > 1 else "")
        if units or columns:
            lines.append(f"high = tl.minimum(low + SPAN, {rows.width})")
            rows.printer.eviction = "evict_last" if level + 1 < self.passes else "evict_first"
            lines += rows.columns_pass(level, ("low", "high"))
        for unit in units:
            lines += self._left(rows, unit)
        last = self._last(rows, level + 1, lines) if joined else ""
        generated = rows.generated(lines, "low, split, SPAN: tl.constexpr, BLOCK: tl.constexpr")
        return SplitLaunch(generated._replace(source=last + generated.source), splits)

    def _last(self, rows: RowPrinter, level: int, lines: list[str]) -> str:
        """Return the function that a row's last program calls, and add the call to the lines.

        A barrier orders all threads' stores before the one thread's release; its acquire, and the barrier that hands
        its value out, order the loads behind every other program's stores.
        """
        again = self._rows(rows.operands)
        inner = self._row_values(again, level, "", past_first_cache=True)
        self.scratch[_COUNTERS] = Workspace(
            f"ws{len(self.scratch)}", "int32", f"cdiv({self.count}, {self.tile[0]})", counters=True
        )
        counter = f"{rows.operands.other(Slot(self.scratch[_COUNTERS].name, 'int32'))} + tl.program_id(0)"
        lines += [
            "tl.debug_barrier()",
            f"arrived = tl.atomic_add({counter}, 1, sem='acq_rel', scope='gpu')",
            f"if arrived == {self.splits - 1}:",
            "    join(rows, row_count, operands, SPAN)",
            f"    tl.store({counter}, 0)",
        ]
        return again.generated(inner, "SPAN: tl.constexpr", "join").source

    def _row_values(self, rows: RowPrinter, level: int, only: str, *, past_first_cache: bool = False) -> list[str]:
        """Print the row values that a level needs, joining what earlier ones left, and store those that are results."""
        stores = [s for s in self.nest.stores if rows.levels[s.value] == level]
        lines = self._joined(rows, level, stores, past_first_cache)
        for store in stores:
            if not rows.per_column(store):
                lines.append(rows.printer.store(store, " & ".join(f"({c})" for c in ("rows < row_count", only) if c)))
        return lines

    def _joined(self, rows: RowPrinter, level: int, stores: Sequence[Store], past_first_cache: bool) -> list[str]:
        roots = [rows.value(u) for u in rows.units(level)] + [s.value for s in stores]
        lines: list[str] = []
        loaded: set[int] = set()
        parts = f"tl.minimum(tl.maximum({rows.width} - parts * SPAN, 0), SPAN)"
        for position in needed_for(self.nest, roots, through=True):
            node = self.nest.nodes[position]
            if 1 in rows.printer.depends[position] or rows.levels[position] > level:
                continue
            if isinstance(node, Reduce):
                unit = rows.unit(rows.pairs[position].first if position in rows.pairs else position)
                if unit.position not in loaded:
                    loaded.add(unit.position)
                    lines += self._loads(rows, unit, past_first_cache)
                lines += rows.join(position, Counts(parts, str(rows.width)))
            else:
                lines.append(rows.printer.statement(position))
        if not loaded:
            return lines
        held = 1 << max(0, self.splits - 1).bit_length()
        return [f"parts = {rows.tile.along(str(held))}", *lines]

    def _loads(self, rows: RowPrinter, unit: Unit, past_first_cache: bool) -> list[str]:
        """Print reading the partial results of all splits of a row.

        Past the first-level cache, where other programs of the same launch made them: it knows nothing of their stores.
        """
        node = self.nest.nodes[unit.position]
        kind = node.kind if isinstance(node, Reduce) else "sum"
        lines = []
        options = f"mask=(parts < {self.splits}) & (rows < row_count)"
        options += ", cache_modifier='.cg'" if past_first_cache else ""
        for number, field in enumerate(unit.fields(self.nest)):
            other = identity_of(kind, field.dtype) if number == 0 else "0" if unit.pair is not None else str(2**31 - 1)
            place = f"{self._place(rows, field.name, field.dtype)} + rows.to(tl.int64) * {self.splits} + parts"
            lines.append(f"{field.name} = tl.load({place}, other={other}, {options})")
        return lines

    def _left(self, rows: RowPrinter, unit: Unit) -> list[str]:
        """Print leaving the partial results of this program."""
        lines, made = leave(rows.tile, unit, rows.lane_counts("(high - low)"))
        for name, field in zip(made, unit.fields(self.nest), strict=True):
            place = f"{self._place(rows, field.name, field.dtype)} + rows.to(tl.int64) * {self.splits} + split"
            lines.append(f"tl.store({place}, {name}.to({DTYPES[field.dtype]}), mask=rows < row_count)")
        return lines

    def _place(self, rows: RowPrinter, name: str, dtype: str) -> str:
        if name not in self.scratch:
            size = product((self.count, self.splits))
            self.scratch[name] = Workspace(f"ws{len(self.scratch)}", dtype, size)
        return rows.operands.other(Slot(self.scratch[name].name, dtype))
