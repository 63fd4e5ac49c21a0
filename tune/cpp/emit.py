"""C++ source of a nest: rows shared between threads, one pass over the columns per level of reduction.

A work item is a row, or for pointwise nests a block of a row's columns. Within an item the columns are cut into
stretches where it is known which piece of a concatenation they lie in, and run through in vectors, several at a time.
"""

import itertools
from collections.abc import Sequence
from typing import Final

import msgspec

from tune_model.runtime.expression import Dim, product
from tune_model.tune.cpp.numbers import KEPT, literal, storage, supported, working
from tune_model.tune.cpp.scope import Columns, Facts, Scope
from tune_model.tune.loops.graph import Pass, along_columns, passes
from tune_model.tune.loops.ir import Cast, Constant, Inside, Load, LoopNest, Op, Reduce, Store, arguments

__all__ = ["Printed", "Shape", "Unprintable", "print_nest"]

EXPORTED: Final = 'extern "C" __attribute__((visibility("default")))'
LANES: Final = "L"
MOST_LANES: Final = 16
_EXPENSIVE: Final = frozenset({"exp", "erf", "tanh", "sigmoid", "log", "pow", "div", "sin", "cos", "log1p", "expm1"})
_STACK_BYTES: Final = 65536
_SUM_BLOCK: Final = 4096
"""Longest run of columns summed into one set of accumulators; longer rows add up block sums, as ATen's cascades do."""


class Unprintable(Exception):  # noqa: N818 - becomes a `Rejected` value
    """The nest has no C++ of this kind; the text says why."""


class Shape(msgspec.Struct, frozen=True):
    """Choices that the numbers do not depend on (beyond the order of sums).

    Attributes:
        unroll: Vectors per step.
        keep: What passes after the first read from a buffer instead of computing it again: `none`, what is `costly`,
            or `all`.
        grain: Least number of elements that is worth a thread.
    """

    unroll: int = 2
    keep: str = "costly"
    grain: int = 16384


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


class _Sizes:
    """Sizes that the running kernel is told."""

    def __init__(self) -> None:
        self.known: list[Dim] = []

    def __call__(self, dim: Dim) -> str:
        if isinstance(dim, int):
            return str(dim)
        if dim not in self.known:
            self.known.append(dim)
        return f"z{self.known.index(dim)}"


class _Kernel:
    def __init__(self, nest: LoopNest, shape: Shape, entry: str) -> None:
        self.entry = entry
        for node in nest.nodes:
            if not supported(node.dtype):
                raise Unprintable(f"values of {node.dtype}")
        self.nest = nest
        self.shape = shape
        self.sizes = _Sizes()
        self.column = len(nest.axes) - 1
        self.facts = Facts(nest, along_columns(nest, max(nest.inner, 1)), self.column, self.sizes)
        self.width = nest.axes[-1].extent
        self.buffers: dict[int, str] = {}
        self.lines: list[str] = []

    # ---- the whole

    def printed(self) -> Printed:
        body = self._item()
        slots = dict.fromkeys(
            [n.access.slot for n in self.nest.nodes if isinstance(n, Load)] + [s.access.slot for s in self.nest.stores]
        )
        types = {n.access.slot: storage(n.dtype) for n in self.nest.nodes if isinstance(n, Load)}
        written = {s.access.slot: storage(self.nest.nodes[s.value].dtype) for s in self.nest.stores}
        declared = [
            f"{written[s]} *const {s} = ({written[s]} *)pointers[{k}];"
            if s in written
            else f"const {types[s]} *const {s} = (const {types[s]} *)pointers[{k}];"
            for k, s in enumerate(slots)
        ]
        items, grain = self._items()
        buffers, release = self._scratch()
        sizes = [f"const int64_t z{k} = sizes[{k}];" for k in range(len(self.sizes.known))]
        lines = [
            "namespace {",
            f"void run_{self.entry}(void *const *pointers, const int64_t *sizes, int64_t begin, int64_t end) {{",
            *declared,
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
        return Printed("\n".join(lines) + "\n", tuple(slots), tuple(self.sizes.known))

    def _outer(self) -> list[int]:
        """Axes whose positions an item has: all rows of a reduction, all but the last axis of a pointwise nest."""
        return list(range(len(self.nest.axes) - max(self.nest.inner, 1)))

    def _blocks(self) -> str | None:
        """Return the number of column blocks of a pointwise row; `None` for a whole row at a time."""
        if self.nest.inner or (isinstance(self.width, int) and (self.width <= self.shape.grain or self._cuts())):
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
        self.buffers = {n: f"k{n}" for n in self._kept(steps)}
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
        work = _Work(stores=tuple(range(len(self.nest.stores))))
        if self._blocks() is None:
            row.lines += self._stretches(row, work)
            return
        width, grain = self.sizes(self.width), self.shape.grain
        ends = ("low", "high")
        lines = self._stretch(row, work, ends, None)
        row.lines.append(f"const int64_t low = block * {grain};")
        row.lines.append(f"const int64_t high = low + {grain} < {width} ? low + {grain} : {width};")
        row.lines += lines

    def _pass(self, row: Scope, step: Pass, kept: dict[int, str], ready: set[int]) -> None:
        keeps = tuple(n for n in step.columns if n in self.buffers and n not in ready)
        ready.update(keeps)
        lines = self._stretches(row, _Work(step.reduces, step.stores, kept, keeps))
        for n in step.reduces:
            row.lines += self._declare(n)
        inner = range(len(self._outer()), self.column)
        row.lines += [f"for (int64_t i{k} = 0; i{k} < {self.nest.axes[k].size}; ++i{k}) {{" for k in inner]
        row.lines += [*lines, *["}"] * len(inner)]
        for n in step.reduces:
            row.lines.append(self._finish(n))
            row.names[n] = f"v{n}"

    # ---- columns

    def _cuts(self) -> set[int]:
        """Return the columns at which a piece of a concatenation begins or ends."""
        width, cuts = self.nest.axes[-1].size, set[int]()
        for n in self.nest.nodes:
            bounds = n.where if isinstance(n, Load) else (n.bound,) if isinstance(n, Inside) else ()
            for b in bounds:
                if b.strides[self.column] == 1 and not any(b.strides[: self.column]):
                    cuts |= {c for c in (b.low - b.offset, b.high - b.offset) if 0 < c < width}
        return cuts

    def _stretches(self, row: Scope, work: "_Work") -> list[str]:
        edges = sorted({0, self.nest.axes[-1].size} | self._cuts())
        lines: list[str] = []
        for low, high in itertools.pairwise(edges):
            lines += self._stretch(row, work, (str(low), str(high)), (low, high))
        return lines

    def _stretch(self, row: Scope, work: "_Work", ends: tuple[str, str], known: tuple[int, int] | None) -> list[str]:
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

    def _block_of(self, work: "_Work", known: tuple[int, int] | None) -> int:
        """Return the length of a block of columns whose sums are added up; 0 for one block."""
        if known is None or known[1] - known[0] <= _SUM_BLOCK or not self._sums(work):
            return 0
        return _SUM_BLOCK

    def _sums(self, work: "_Work") -> list[int]:
        return [n for n in work.reduces if self._reduce(n).kind == "sum" and self._reduce(n).dtype.startswith("float")]

    def _reduce(self, n: int) -> Reduce:
        node = self.nest.nodes[n]
        assert isinstance(node, Reduce)  # noqa: S101 - passes list reductions only
        return node

    def _acc(self, n: int) -> str:
        node = self._reduce(n)
        return working(self.nest.nodes[node.value].dtype if node.kind in {"argmax", "argmin"} else node.dtype)

    def _vector(self, row: Scope, work: "_Work", columns: Columns, u: int) -> list[str]:
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
            return f"store_strided({pointer}, {self.sizes(stride)}, {value}, {columns.lanes});"
        return f"store({pointer}, {value});" if columns.full else f"store_part({pointer}, {value}, n);"

    # ---- reductions

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

    def _declare(self, n: int) -> list[str]:
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
            for k in range(len(self._outer()), self.column):
                inside = product(tuple(a.size for a in self.nest.axes[k + 1 :]))
                at = f"i{k} * {inside} + {at}"
            valid = "splat(int32_t(-1))" if columns.full else "first_lanes(n)"
            return f"better<{_true(node.kind == 'argmax')}>({name}, {value}, iota() + int32_t({at}), {valid});"
        if not columns.full:
            value = f"op_where(first_lanes(n), {value}, splat<{self._acc(n)}>({self._identity(n)}))"
        return f"{name} = {_combine(node.kind, name, value)};"

    def _finish(self, n: int) -> str:
        node, kind = self._reduce(n), self._acc(n)
        unroll = self.shape.unroll
        if node.kind in {"argmax", "argmin"}:
            largest = _true(node.kind == "argmax")
            merges = " ".join(
                f"better<{largest}>(s{n}_0, s{n}_{u}.value, s{n}_{u}.column, ~as_mask(s{n}_{u}.column == NO_COLUMN));"
                for u in range(1, unroll)
            )
            return f"{merges} const int64_t v{n} = best_column<{largest}>(s{n}_0);"
        total = f"s{n}_0"
        for u in range(1, unroll):
            total = _combine(node.kind, total, f"s{n}_{u}")
        if node.kind == "sum" and node.dtype.startswith("float"):
            total += "".join(f" + t{n}_{u}" for u in range(unroll))
        pair = f"[]({kind} x, {kind} y) {{ return {_combine(node.kind, 'x', 'y')}; }}"
        return f"const {kind} v{n} = fold<{kind}>({total}, {pair});"


class _Work(msgspec.Struct, frozen=True):
    """What one pass does at each column."""

    reduces: tuple[int, ...] = ()
    stores: tuple[int, ...] = ()
    kept: dict[int, str] = {}
    keeps: tuple[int, ...] = ()


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


def print_nest(nest: LoopNest, shape: Shape, entry: str = "entry") -> Printed:
    """Print a nest as the function `entry`.

    Raises:
        Unprintable: An element type that C++ does not hold.
    """
    return _Kernel(nest, shape, entry).printed()
