"""Prints the functions that `kernels/rows.py` calls: a nest over rows, in one pass or looped, or over flat elements.

One pass holds whole rows. A loop reads the columns once per level of reductions: what a reduction's result feeds is
computed in a later pass, from loads that the cache then serves. A store happens in the first pass that has its value.
"""

from typing import NamedTuple

from tune_model.runtime.expression import Dim, evaluate, product
from tune_model.runtime.program import Form
from tune_model.runtime.replay import slot_sizes
from tune_model.tune.loops.ir import Axis, LoopNest, Node, Reduce, Store, arguments
from tune_model.tune.triton.emit import DTYPES, Operands, Printer, Space, node_dtype
from tune_model.tune.triton.launch import Argument

__all__ = ["Generated", "pointwise_function", "row_function"]


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


# Kind: identity for floats, for integers; how two parts combine; how a tile reduces.
_REDUCTIONS = {
    "sum": ("0.0", "0", "{0} + {1}", "tl.sum({0}, axis=1, keep_dims=True)"),
    "prod": ("1.0", "1", "{0} * {1}", "tl.reduce({0}, 1, numeric.multiply, keep_dims=True)"),
    "max": ("float('-inf')", "low", "numeric.maximum({0}, {1})", "tl.reduce({0}, 1, numeric.maximum, keep_dims=True)"),
    "min": ("float('inf')", "high", "numeric.minimum({0}, {1})", "tl.reduce({0}, 1, numeric.minimum, keep_dims=True)"),
    "any": ("0", "0", "{0} | {1}", "tl.max({0}, axis=1, keep_dims=True)"),
    "all": ("1", "1", "{0} & {1}", "tl.min({0}, axis=1, keep_dims=True)"),
    "argmax": ("float('-inf')", "low", "numeric.first_largest", ""),
    "argmin": ("float('inf')", "high", "numeric.first_smallest", ""),
}
_BITS = {"int8": 8, "int16": 16, "int32": 32, "int64": 64}


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


def row_function(nest: LoopNest, form: Form, rows: int, block: int) -> Generated:
    """Print a nest with columns for programs of `rows` rows and `block` columns at a time."""
    return _Rows(nest, form, rows, block).print()


def _unflatten(
    index: str, axes: tuple[Axis, ...], prefix: str, operands: Operands
) -> tuple[list[str], tuple[str, ...]]:
    """Write each axis's variable as a part of a row-major index; the outermost needs no remainder."""
    lines: list[str] = []
    names = []
    rest = index
    for place in range(len(axes) - 1, -1, -1):
        name = f"{prefix}{place}"
        size = operands.size(axes[place].extent)
        if place == 0:
            lines.append(f"{name} = {rest}")
        else:
            lines.append(f"{name} = ({rest}) % {size}")
            lines.append(f"{prefix}_rest{place} = ({rest}) // {size}")
            rest = f"{prefix}_rest{place}"
        names.append(name)
    return lines, tuple(names[::-1])


class _Rows:
    """Prints one row function."""

    def __init__(self, nest: LoopNest, form: Form, rows: int, block: int) -> None:
        self.nest = nest
        self.rows = rows
        self.block = block
        self.operands = Operands(form)
        split = len(nest.axes) - nest.inner
        self.outer, self.inner = nest.axes[:split], nest.axes[split:]
        values = slot_sizes(form)
        self.columns = product(tuple(a.extent for a in self.inner))
        self.width = evaluate(self.columns, values)
        self.looped = block < self.width
        self.count = product(tuple(a.extent for a in self.outer))
        even = isinstance(self.columns, int) and self.columns % block == 0
        self.row_lines, row_names = _unflatten("rows", self.outer, "r", self.operands)
        self.column_lines, column_names = _unflatten("columns", self.inner, "c", self.operands)
        inside = (
            None if rows == 1 else "rows < row_count",
            None if even else f"columns < {self.operands.size(self.columns)}",
        )
        groups = (0,) * split + (1,) * nest.inner
        self.space = Space((*row_names, *column_names), groups, inside)
        self.printer = Printer(nest, self.space, self.operands)
        self.passes = _passes(nest)

    def print(self) -> Generated:
        body = self._looped() if self.looped else self._persistent()
        lines = [*self.row_lines, *body]
        text = "@triton.jit\ndef body(rows, row_count, operands, BLOCK: tl.constexpr):\n"
        text += "".join(f"    {line}\n" for line in lines)
        return Generated(text, self.operands.arguments(), self.count)

    def _varies(self, position: int) -> bool:
        """Whether a node depends on the columns."""
        return 1 in self.printer.depends[position]

    def _persistent(self) -> list[str]:
        lines = ["columns = tl.arange(0, BLOCK)[None, :]", *self.column_lines]
        for position, node in enumerate(self.nest.nodes):
            if isinstance(node, Reduce):
                lines += self._start(position, node)
                lines += self._gather(position, node, self.printer.names[node.value])
                lines.append(self._finish(position, node))
            else:
                lines.append(self.printer.statement(position))
        return lines + [self.printer.store(store) for store in self.nest.stores]

    def _looped(self) -> list[str]:
        lines: list[str] = []
        nodes = self.nest.nodes
        for level in range(max(self.passes) + 1):
            reduces = [
                (n, node)
                for n, node in enumerate(nodes)
                if isinstance(node, Reduce) and self.passes[node.value] == level
            ]
            for position, node in enumerate(nodes):
                if self.passes[position] == level and not self._varies(position):
                    if isinstance(node, Reduce):
                        lines.append(self._finish(position, node))
                    else:
                        lines.append(self.printer.statement(position))
            stores = [s for s in self.nest.stores if self.passes[s.value] == level]
            lines += [self.printer.store(s) for s in stores if not self._per_column(s)]
            lines += self._loop(level, reduces, [s for s in stores if self._per_column(s)])
        return lines

    def _per_column(self, store: Store) -> bool:
        return any(s != 0 for s in store.access.strides[len(self.outer) :])

    def _loop(self, level: int, reduces: list[tuple[int, Reduce]], stores: list[Store]) -> list[str]:
        """Print one pass over the columns: everything its reductions and stores need, loads included."""
        if not reduces and not stores:
            return []
        lines: list[str] = []
        for position, node in reduces:
            lines += self._start(position, node)
        needed = _needed(self.nest, [n.value for _, n in reduces] + [s.value for s in stores])
        lines.append(f"for start in tl.range(0, {self.operands.size(self.columns)}, BLOCK):")
        inside = ["columns = start + tl.arange(0, BLOCK)[None, :]", *self.column_lines]
        names = list(self.printer.names)
        for position in needed:
            if self._varies(position):
                self.printer.names[position] = f"p{level}_{position}"
                inside.append(self.printer.statement(position))
        for position, node in reduces:
            inside += self._gather(position, node, self.printer.names[node.value])
        inside += [self.printer.store(s) for s in stores]
        self.printer.names = names
        return lines + [f"    {line}" for line in inside]

    def _start(self, position: int, node: Reduce) -> list[str]:
        """Print the accumulators at their identity."""
        shape = f"[{self.rows}, BLOCK]"
        dtype = _accumulator(self.nest, node)
        lines = [f"acc{position} = tl.full({shape}, {_identity(node, dtype)}, {DTYPES[dtype]})"]
        if node.kind in {"argmax", "argmin"}:
            lines.append(f"at{position} = tl.full({shape}, {2**31 - 1}, tl.int32)")
        return lines

    def _gather(self, position: int, node: Reduce, value: str) -> list[str]:
        """Print taking one tile of columns into the accumulators."""
        dtype = _accumulator(self.nest, node)
        source = f"{value}.to({DTYPES[dtype]})" if node.kind not in {"any", "all"} else f"({value} != 0).to(tl.int32)"
        identity = f"tl.full([1, 1], {_identity(node, dtype)}, {DTYPES[dtype]})"
        mask = self.space.inside[1]
        part = f"part{position}"
        # Also broadcasts what does not vary over the rows or the columns to the tile.
        lines = [f"{part} = tl.where({mask or 'columns >= 0'}, {source}, {identity})"]
        combine = _REDUCTIONS[node.kind][2]
        if node.kind in {"argmax", "argmin"}:
            # A place outside never wins: its position is larger than any inside.
            lines.append(f"here{position} = tl.where({mask or 'columns >= 0'}, columns, {2**31 - 2})")
            names = f"acc{position}, at{position}"
            return [*lines, f"{names} = {combine}({names}, {part}, here{position})"]
        return [*lines, f"acc{position} = {combine.format(f'acc{position}', part)}"]

    def _finish(self, position: int, node: Reduce) -> str:
        """Print reducing the accumulators to one value per row."""
        name = self.printer.names[position]
        if node.kind in {"argmax", "argmin"}:
            pair = f"(acc{position}, at{position})"
            reduced = f"tl.reduce({pair}, 1, {_REDUCTIONS[node.kind][2]}, keep_dims=True)"
            return f"{name} = {reduced}[1].to(tl.int64)"
        text = _REDUCTIONS[node.kind][3].format(f"acc{position}")
        return f"{name} = {text} != 0" if node.kind in {"any", "all"} else f"{name} = {text}"


def _accumulator(nest: LoopNest, node: Reduce) -> str:
    """Return the dtype a reduction runs in."""
    if node.kind in {"any", "all"}:
        return "int32"
    if node.kind in {"argmax", "argmin", "max", "min"}:
        dtype = node_dtype(nest.nodes[node.value])
        return "int32" if dtype in {"bool", "uint8"} else "float32" if dtype in {"float16", "bfloat16"} else dtype
    return node.dtype


def _identity(node: Reduce, dtype: str) -> str:
    of_floats, of_integers, _, _ = _REDUCTIONS[node.kind]
    if dtype.startswith(("float", "bfloat")):
        return of_floats
    limit = 1 << (_BITS[dtype] - 1)
    return {"low": str(-limit), "high": str(limit - 1)}.get(of_integers, of_integers)


def _needed(nest: LoopNest, roots: list[int]) -> list[int]:
    """Return the nodes that roots are computed from, in order; not what lies behind a reduction."""
    found: set[int] = set()
    stack = list(roots)
    while stack:
        position = stack.pop()
        if position in found:
            continue
        found.add(position)
        node: Node = nest.nodes[position]
        if not isinstance(node, Reduce):
            stack.extend(arguments(node))
    return sorted(found)


def _passes(nest: LoopNest) -> list[int]:
    """Return for every node the first pass over the columns in which it can be computed."""
    passes: list[int] = []
    for node in nest.nodes:
        earliest = max((passes[a] for a in arguments(node)), default=0)
        passes.append(earliest + 1 if isinstance(node, Reduce) else earliest)
    return passes
