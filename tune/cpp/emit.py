"""C++ source of a nest: rows shared between threads, one pass over the columns per level of reduction.

A work item is a row, or for pointwise nests a block of a row's columns. Within an item the columns are cut into
stretches where it is known which piece of a concatenation they lie in, and run through in vectors, several at a time.
"""

from collections.abc import Sequence
from typing import Final

import msgspec

from tune_model.runtime.expression import Dim, product
from tune_model.tune.cpp.columns import ColumnPrinter, Shape, Work
from tune_model.tune.cpp.numbers import KEPT, storage, supported
from tune_model.tune.cpp.scope import Facts, Scope
from tune_model.tune.loops.graph import Pass, along_columns, passes
from tune_model.tune.loops.ir import Cast, Constant, Inside, Load, LoopNest, Op, Reduce, Store, arguments

__all__ = ["EXPORTED", "Printed", "Shape", "Sizes", "Unprintable", "check_types", "declare_slots", "print_nest"]

EXPORTED: Final = 'extern "C" __attribute__((visibility("default")))'
_EXPENSIVE: Final = frozenset({"exp", "erf", "tanh", "sigmoid", "log", "pow", "div", "sin", "cos", "log1p", "expm1"})
_STACK_BYTES: Final = 65536


class Unprintable(Exception):  # noqa: N818 - becomes a `Rejected` value
    """The nest has no C++ of this kind; the text says why."""


class Printed(msgspec.Struct, frozen=True):
    """A kernel's body.

    Attributes:
        source: Functions, to follow the headers.
        pointers: Slots, in the order the entry takes them.
        sizes: Expressions, in the order the entry takes them.
    """

    source: str
    pointers: tuple[str, ...]
    sizes: tuple[Dim, ...]


class Sizes:
    """Sizes that the running kernel is told."""

    def __init__(self) -> None:
        self.known: list[Dim] = []

    def __call__(self, dim: Dim) -> str:
        """Print a size: a number, or the variable that holds what the kernel is told."""
        if isinstance(dim, int):
            return str(dim)
        if dim not in self.known:
            self.known.append(dim)
        return f"z{self.known.index(dim)}"

    def declared(self) -> list[str]:
        """Print the variables."""
        return [f"const int64_t z{k} = sizes[{k}];" for k in range(len(self.known))]


def check_types(nest: LoopNest) -> None:
    """Refuse element types that C++ does not hold.

    Raises:
        Unprintable: There is one.
    """
    for node in nest.nodes:
        if not supported(node.dtype):
            raise Unprintable(f"values of {node.dtype}")


def declare_slots(nest: LoopNest) -> dict[str, str]:
    """Return, for each slot in the order of the entry's pointers, what declares it."""
    read = {n.access.slot: storage(n.dtype) for n in nest.nodes if isinstance(n, Load)}
    written = {s.access.slot: storage(nest.nodes[s.value].dtype) for s in nest.stores}
    types = {s: written.get(s) or f"const {t}" for s, t in read.items()} | written
    return {s: f"{t} *const {s} = ({t} *)pointers[{k}];" for k, (s, t) in enumerate(types.items())}


class _Kernel:
    def __init__(self, nest: LoopNest, shape: Shape, entry: str) -> None:
        self.entry = entry
        check_types(nest)
        self.nest = nest
        self.shape = shape
        self.sizes = Sizes()
        self.column = len(nest.axes) - 1
        self.facts = Facts(nest, along_columns(nest, max(nest.inner, 1)), self.column, self.sizes)
        self.width = nest.axes[-1].extent
        self.buffers: dict[int, str] = {}
        self.columns = ColumnPrinter(self.facts, shape, self.buffers)

    # ---- the whole

    def printed(self) -> Printed:
        body = self._item()
        declared = declare_slots(self.nest)
        items, grain = self._items()
        buffers, release = self._scratch()
        sizes = self.sizes.declared()
        lines = [
            "namespace {",
            f"void run_{self.entry}(void *const *pointers, const int64_t *sizes, int64_t begin, int64_t end) {{",
            *declared.values(),
            *sizes,
            *buffers,
            *self._counters(),
            "for (int64_t item = begin; item < end; ++item) {",
            *body,
            *self._count(),
            "}",
            *release,
            "}",
            "}  // namespace",
            f"{EXPORTED} void {self.entry}(void *const *pointers, const int64_t *sizes) {{",
            *sizes,
            f"parallel(run_{self.entry}, pointers, sizes, {items}, {grain});",
            "}",
        ]
        return Printed("\n".join(lines) + "\n", tuple(declared), tuple(self.sizes.known))

    def _outer(self) -> list[int]:
        """Axes whose positions an item has: all rows of a reduction, all but the last axis of a pointwise nest."""
        return list(range(len(self.nest.axes) - max(self.nest.inner, 1)))

    def _blocks(self) -> str | None:
        """Return the number of column blocks of a pointwise row; `None` for a whole row at a time."""
        if self.nest.inner or (isinstance(self.width, int) and (self.width <= self.shape.grain or self.columns.cuts())):
            return None
        return f"(({self.sizes(self.width)} + {self.shape.grain - 1}) / {self.shape.grain})"

    def _items(self) -> tuple[str, str]:
        rows = [self.sizes(self.nest.axes[k].extent) for k in self._outer()]
        blocks = self._blocks()
        items = " * ".join([*rows, *([blocks] if blocks else [])]) or "1"
        width = product(tuple(a.extent for a in self.nest.axes[len(self._outer()) :]))
        each = max(1, self.shape.grain // max(1, width)) if isinstance(width, int) else 1
        return items, str(each)

    def _counters(self) -> list[str]:
        """Declare the position of the first item on each axis."""
        lines = ["int64_t rest = begin;"]
        blocks = self._blocks()
        counters = [(f"i{k}", self.sizes(self.nest.axes[k].extent)) for k in self._outer()]
        counters += [("block", blocks)] if blocks else []
        for name, size in reversed(counters):
            lines.append(f"int64_t {name} = rest % {size}; rest /= {size};")
        return lines if counters else []

    def _count(self) -> list[str]:
        """Step to the next item."""
        counters = [(f"i{k}", self.sizes(self.nest.axes[k].extent)) for k in self._outer()]
        blocks = self._blocks()
        counters += [("block", blocks)] if blocks else []
        text = ""
        for name, size in counters:
            text = f"if (++{name} == {size}) {{ {name} = 0; {text} }}" if text else f"++{name};"
        return [text] if text else []

    def _scratch(self) -> tuple[list[str], list[str]]:
        count = 1
        for axis in self.nest.axes[len(self.nest.axes) - self.nest.inner :]:
            count *= axis.size
        wanted = [(name, KEPT[self.nest.nodes[n].dtype]) for n, name in self.buffers.items()]
        if count * 8 * len(wanted) <= _STACK_BYTES:
            return [f"alignas(64) {t} {name}[{count}];" for name, t in wanted], []
        lines = [f"{t} *const {name} = ({t} *)__builtin_malloc(sizeof({t}) * {count});" for name, t in wanted]
        lines.append(f"if ({' || '.join(f'!{name}' for name, _ in wanted)}) __builtin_abort();")
        return lines, [f"__builtin_free({name});" for name, _ in wanted]

    # ---- one item

    def _item(self) -> list[str]:
        row = Scope(self.facts)
        if self.nest.inner == 0:
            self._pointwise(row)
            return row.lines
        steps, _ = passes(self.nest)
        self.buffers.update({n: f"k{n}" for n in self._kept(steps)})
        ready: set[int] = set()
        for step in steps:
            self._pass(row, step, {n: k for n, k in self.buffers.items() if n in ready}, ready)
        every = {k for step in steps for k in step.stores}
        for k, store in enumerate(self.nest.stores):
            if k not in every:
                self._store_row(row, store)
        return row.lines

    def _kept(self, steps: Sequence[Pass]) -> list[int]:
        """Choose values that several passes need: the last ones before the passes' ways part."""
        if self.shape.keep == "none" or self.nest.inner > 1:
            return []
        nodes = self.nest.nodes
        first: dict[int, int] = {}
        for p, step in enumerate(steps):
            for n in (*step.columns, *step.reduces):
                first.setdefault(n, p)
        chosen = []
        for n, began in first.items():
            if isinstance(nodes[n], Constant | Inside | Reduce) or self._cheap(n):
                continue
            users = [u for u in range(len(nodes)) if n in arguments(nodes[u])]
            wanted = any(
                any(first.get(u, -1) == p for u in users) or any(self.nest.stores[k].value == n for k in step.stores)
                for p, step in enumerate(steps)
                if p > began
            )
            if wanted and (self.shape.keep == "all" or self._costly(n)):
                chosen.append(n)
        return sorted(chosen)

    def _cheap(self, n: int) -> bool:
        node = self.nest.nodes[n]
        return isinstance(node, Load) and node.access.strides[self.column] == 1 and not node.gather

    def _costly(self, n: int) -> bool:
        """Whether computing a value again costs more than reading it."""
        seen: set[int] = set()
        stack, loads, work = [n], 0, 0
        while stack:
            k = stack.pop()
            if k in seen or not self.facts.varies[k]:
                continue
            seen.add(k)
            node = self.nest.nodes[k]
            loads += isinstance(node, Load)
            work += 8 if isinstance(node, Op) and node.name in _EXPENSIVE else isinstance(node, Op | Cast)
            work += 8 if isinstance(node, Load) and not self._cheap(k) else 0
            stack.extend(arguments(node))
        return loads > 1 or work > 3

    def _store_row(self, row: Scope, store: Store) -> None:
        value = row.name(store.value)
        dtype = self.nest.nodes[store.value].dtype
        place = row.place(store.access.strides, store.access.offset, columns=False)
        text = f"uint8_t(-{value})" if dtype == "bool" else value
        row.lines.append(f"{store.access.slot}[{place}] = {text};")

    def _pointwise(self, row: Scope) -> None:
        work = Work(stores=tuple(range(len(self.nest.stores))))
        if self._blocks() is None:
            row.lines += self.columns.stretches(row, work)
            return
        width, grain = self.sizes(self.width), self.shape.grain
        ends = ("low", "high")
        lines = self.columns.stretch(row, work, ends, None)
        row.lines.append(f"const int64_t low = block * {grain};")
        row.lines.append(f"const int64_t high = low + {grain} < {width} ? low + {grain} : {width};")
        row.lines += lines

    def _pass(self, row: Scope, step: Pass, kept: dict[int, str], ready: set[int]) -> None:
        keeps = tuple(n for n in step.columns if n in self.buffers and n not in ready)
        ready.update(keeps)
        lines = self.columns.stretches(row, Work(step.reduces, step.stores, kept, keeps))
        for n in step.reduces:
            row.lines += self.columns.declare(n)
        inner = range(len(self._outer()), self.column)
        row.lines += [f"for (int64_t i{k} = 0; i{k} < {self.nest.axes[k].size}; ++i{k}) {{" for k in inner]
        row.lines += [*lines, *["}"] * len(inner)]
        for n in step.reduces:
            row.lines += [*self.columns.merged(n), self.columns.finish(n)]
            row.names[n] = f"v{n}"


def print_nest(nest: LoopNest, shape: Shape, entry: str = "entry") -> Printed:
    """Print a nest as the function `entry`; each thread has rows, or blocks of a pointwise nest, of its own.

    Raises:
        Unprintable: An element type that C++ does not hold.
    """
    return _Kernel(nest, shape, entry).printed()
