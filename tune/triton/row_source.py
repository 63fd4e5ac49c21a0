"""Prints the functions that `kernels/rows.py` calls: a nest over rows, whole or looped, or over flat elements.

Whole rows are held in registers, and everything is asked for before the first reduction waits: a compiler moves no load
above its barriers. A loop reads the columns once per level of reductions (tune/loops/online.py): what a reduction's
result feeds is computed in a later pass, from loads that the cache then serves. A store happens in the first pass that
has its value.
"""

from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

from tune_model.extract.cost import size_bytes, type_bytes
from tune_model.runtime.expression import Dim, evaluate, product
from tune_model.runtime.program import Form
from tune_model.runtime.replay import slot_sizes
from tune_model.tune.loops.ir import Axis, Load, LoopNest, Node, Reduce, Store, arguments
from tune_model.tune.loops.online import Pair, find_pairs, levels
from tune_model.tune.triton.accumulate import Counts, Tile, Unit, join_first, join_second, start, take, whole
from tune_model.tune.triton.emit import Operands, Printer, Space
from tune_model.tune.triton.launch import Argument, SizeOf

__all__ = ["Generated", "Loop", "RowPrinter", "element_count", "needed_for", "pointwise_function", "row_function"]

_CACHE_BYTES: Final = 48 << 20
"""About what a second-level cache holds. A kernel that moves more should leave its results there, if they fit, and not
what it has read; where neither fits, saying so made it 4 % slower (a residual and LayerNorm of 32768 x 8192, H200,
Triton 3.6, 2026-11-30)."""


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


def element_count(extent: Dim, form: Form) -> SizeOf:
    """Return a flat nest's number of elements as an argument.

    Accesses are wide only if their mask is known to change at multiples of 16 elements. That is promised where it holds
    for any rows, or a kernel tuned for 16 rows would not serve 5.
    """
    sizes = slot_sizes(form)
    slots = (*form.parameters, *form.results)
    one_row = sizes | {f"{slot.name}.size{axis}": 1 for slot in slots for axis in range(len(slot.type.shape) - 1)}
    return SizeOf(extent, divisible=all(evaluate(extent, values) % 16 == 0 for values in (sizes, one_row)))


def row_function(nest: LoopNest, form: Form, rows: int, block: int, loop: Loop | None = None) -> Generated:
    """Print a nest with columns for programs of `rows` rows and `block` columns at a time."""
    printer = RowPrinter(nest, form, rows, block, loop or Loop())
    return printer.whole() if block >= printer.width else printer.looped()


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
            # What is adjacent along the innermost axis is known to be so only if its length is a multiple.
            size = (operands.size if place == len(axes) - 1 else operands.extent)(axes[place].extent)
            lines.append(f"{name} = ({rest}) % {size}")
            lines.append(f"{prefix}_rest{place} = ({rest}) // {size}")
            rest = f"{prefix}_rest{place}"
        names.append(name)
    return lines, tuple(names[::-1])


class RowPrinter:
    """Prints one function over tiles of rows and columns.

    Args:
        nest: With columns.
        form: What it computes.
        rows: Of a tile.
        block: Columns of a tile.
        loop: How loops are compiled.
        operands: What the function is given, shared with another one.

    Attributes:
        tile: Rows at a time.
        width: How many columns there are.
        count: How many rows there are.
        printer: Prints nodes.
        pairs: By the second reduction.
        levels: Per node, how many passes over the columns must be over before it is known.
    """

    def __init__(
        self, nest: LoopNest, form: Form, rows: int, block: int, loop: Loop, operands: Operands | None = None
    ) -> None:
        self.nest = nest
        self.form = form
        self.tile = Tile(nest, rows)
        self.loop = loop
        self.operands = operands or Operands(form)
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
        written = sum(type_bytes(result.type) for result in self.form.results)
        if written <= _CACHE_BYTES < size_bytes(self.form):
            self.printer.eviction = "evict_first"
        lines = [*self._held(), *(self.printer.store(store) for store in self.nest.stores)]
        return self.generated(lines, "BLOCK: tl.constexpr")

    def returned(self) -> Generated:
        """Hold rows whole, and return what the nest's one store would write."""
        (store,) = self.nest.stores
        return self.generated([*self._held(), f"return {self.printer.names[store.value]}"], "BLOCK: tl.constexpr")

    def _held(self) -> list[str]:
        lines = [f"columns = {self.tile.along('BLOCK')}", *self.column_lines]
        names, nodes = self.printer.names, self.nest.nodes
        # What is looked up waits for its index anyway.
        asked = {position: isinstance(node, Load) and not node.gather for position, node in enumerate(nodes)}
        for position in sorted(asked, key=lambda position: not asked[position]):
            node = nodes[position]
            if isinstance(node, Reduce):
                lines += whole(self.tile, position, names[position], names[node.value], self.space.inside[1])
            else:
                lines.append(self.printer.statement(position))
        return lines

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
        """Return what a reduction accumulates in: its own, or with the second of its pair."""
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
        needed = needed_for(self.nest, [self.value(u) for u in units] + [s.value for s in stores])
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

    def generated(self, lines: Sequence[str], parameters: str, name: str = "body") -> Generated:
        """Return the function with these lines after those that name rows."""
        text = f"@triton.jit\ndef {name}(rows, row_count, operands, {parameters}):\n"
        text += "".join(f"    {line}\n" for line in (*self.row_lines, *lines))
        return Generated(text, self.operands.arguments(), self.count)


def needed_for(nest: LoopNest, roots: Sequence[int], *, through: bool = False) -> list[int]:
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
