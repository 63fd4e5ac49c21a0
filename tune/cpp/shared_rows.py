"""C++ source of a nest whose rows are few and long: threads share each row, chunk by chunk.

Every pass over the columns is a parallel region of its own over all chunks of all rows. It leaves its reductions'
accumulators, one vector per chunk; the next pass joins those of its row, which is little work, so every chunk does it.
"""

from collections.abc import Sequence
from typing import Final

from tune_model.tune.cpp.columns import ColumnPrinter, Work
from tune_model.tune.cpp.emit import EXPORTED, Printed, Shape, Sizes, check_types, declare_slots
from tune_model.tune.cpp.scope import Facts, Scope
from tune_model.tune.loops.graph import Pass, along_columns, passes
from tune_model.tune.loops.ir import LoopNest, Reduce, Store

__all__ = ["can_share", "print_shared"]

_ALIGNMENT: Final = 128
"""Of the widest vector, and more than a cache line: chunks of different threads do not share one."""


def can_share(nest: LoopNest) -> bool:
    """Say whether a nest's rows may be cut: one axis of columns, and no concatenation along it."""
    if nest.inner != 1:
        return False
    facts = Facts(nest, along_columns(nest, 1), len(nest.axes) - 1, str)
    return not ColumnPrinter(facts, Shape(), {}).cuts()


class _Shared:
    def __init__(self, nest: LoopNest, shape: Shape, entry: str) -> None:
        check_types(nest)
        self.nest = nest
        self.shape = shape
        self.entry = entry
        self.sizes = Sizes()
        self.facts = Facts(nest, along_columns(nest, 1), len(nest.axes) - 1, self.sizes)
        self.columns = ColumnPrinter(self.facts, shape, {})
        self.slots = declare_slots(nest)
        self.reduces = [n for n, node in enumerate(nest.nodes) if isinstance(node, Reduce)]
        self.steps, _ = passes(nest)
        self.rows = " * ".join(self.sizes(axis.extent) for axis in nest.axes[:-1])

    def printed(self) -> Printed:
        functions = [self._pass(p, step) for p, step in enumerate(self.steps)]
        stored = {k for step in self.steps for k in step.stores}
        rest = [store for k, store in enumerate(self.nest.stores) if k not in stored]
        last = self._row_stores(rest)
        chunks = self.shape.chunks
        calls = [f"parallel(run_{self.entry}_{p}, all, sizes, rows * {chunks}, 1);" for p in range(len(self.steps))]
        if rest:
            calls.append(f"rows_{self.entry}(all, sizes, 0, rows);")
        lines = [
            "namespace {",
            *(line for function in functions for line in function),
            *last,
            "}  // namespace",
            f"{EXPORTED} void {self.entry}(void *const *pointers, const int64_t *sizes) {{",
            *self.sizes.declared(),
            f"const int64_t rows = {self.rows};",
            "if (rows <= 0) return;",
            *self._memory(),
            *calls,
            "__builtin_free(memory);",
            "}",
        ]
        return Printed("\n".join(lines) + "\n", tuple(self.slots), tuple(self.sizes.known))

    def _memory(self) -> list[str]:
        """Print allocating the chunks' accumulators behind the slots' pointers."""
        count = len(self.slots)
        lines = [f"void *all[{count + len(self.reduces)}];"]
        lines += [f"all[{k}] = pointers[{k}];" for k in range(count)]
        each = [f"sizeof({self.columns.held(n)}) * rows * {self.shape.chunks}" for n in self.reduces]
        total = " + ".join(f"({size} + {_ALIGNMENT})" for size in each)
        lines.append(f"char *const memory = (char *)__builtin_malloc({total} + {_ALIGNMENT});")
        lines.append("if (!memory) __builtin_abort();")
        lines.append(f"char *at = memory + ({_ALIGNMENT} - (uintptr_t)memory % {_ALIGNMENT});")
        for k, size in enumerate(each):
            lines.append(f"all[{count + k}] = at;")
            lines.append(f"at += ({size} + {_ALIGNMENT - 1}) / {_ALIGNMENT} * {_ALIGNMENT};")
        return lines

    def _head(self, name: str) -> list[str]:
        count = len(self.slots)
        return [
            f"void {name}(void *const *pointers, const int64_t *sizes, int64_t begin, int64_t end) {{",
            *self.slots.values(),
            *self.sizes.declared(),
            *(
                f"{self.columns.held(n)} *const parts{n} = ({self.columns.held(n)} *)pointers[{count + k}];"
                for k, n in enumerate(self.reduces)
            ),
            "for (int64_t item = begin; item < end; ++item) {",
        ]

    def _places(self, item: str) -> list[str]:
        """Print a row's position on each axis."""
        lines = [f"int64_t rest = {item};"]
        for k in range(len(self.nest.axes) - 2, -1, -1):
            size = self.sizes(self.nest.axes[k].extent)
            lines.append(f"const int64_t i{k} = rest % {size}; rest /= {size};")
        return lines

    def _known(self, row: Scope, before: int, item: str) -> None:
        """Join what the passes before left of this row."""
        for p in range(before):
            for n in self.steps[p].reduces:
                joined = self.columns.joined(n, f"(parts{n} + {item} * {self.shape.chunks})", self.shape.chunks)
                row.lines += [f"const auto join{n} = [&] {{", *joined, self.columns.finish(n), f"return v{n}; }};"]
                row.lines.append(f"const auto v{n} = join{n}();")
                row.names[n] = f"v{n}"

    def _pass(self, number: int, step: Pass) -> list[str]:
        chunks, width = self.shape.chunks, self.sizes(self.nest.axes[-1].extent)
        row = Scope(self.facts)
        self._known(row, number, "row")
        for n in step.reduces:
            row.lines += self.columns.declare(n)
        body = self.columns.stretch(row, Work(step.reduces, step.stores), ("low", "high"), None)
        row.lines += body
        for n in step.reduces:
            row.lines += [*self.columns.merged(n), f"parts{n}[item] = s{n}_0;"]
        return [
            *self._head(f"run_{self.entry}_{number}"),
            f"const int64_t row = item / {chunks}, chunk = item % {chunks};",
            *self._places("row"),
            # Chunks begin at multiples of 64 elements: whole cache lines of every type.
            f"const int64_t each = (({width} + {chunks - 1}) / {chunks} + 63) / 64 * 64;",
            f"const int64_t low = chunk * each < {width} ? chunk * each : {width};",
            f"const int64_t high = low + each < {width} ? low + each : {width};",
            *row.lines,
            "}",
            "}",
        ]

    def _row_stores(self, stores: Sequence[Store]) -> list[str]:
        """Print the function that writes what there is one of per row."""
        if not stores:
            return []
        row = Scope(self.facts)
        self._known(row, len(self.steps), "item")
        for store in stores:
            value = row.name(store.value)
            place = row.place(store.access.strides, store.access.offset, columns=False)
            text = f"uint8_t(-{value})" if self.nest.nodes[store.value].dtype == "bool" else value
            row.lines.append(f"{store.access.slot}[{place}] = {text};")
        return [*self._head(f"rows_{self.entry}"), *self._places("item"), *row.lines, "}", "}"]


def print_shared(nest: LoopNest, shape: Shape, entry: str = "entry") -> Printed:
    """Print a nest as the function `entry`, its rows cut into `shape.chunks` chunks; only where `can_share`.

    Raises:
        Unprintable: An element type that C++ does not hold.
    """
    return _Shared(nest, shape, entry).printed()
