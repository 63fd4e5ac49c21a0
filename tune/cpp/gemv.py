"""C++ source of a matmul with a few rows: dot products with the weight's rows, then the epilogue's nest on the results.

A work item is a block of the result's columns, so threads share the weight. One kernel serves 1 to `MOST_ROWS` rows.
"""

from typing import Final

import msgspec

from tune_model.runtime.expression import Dim
from tune_model.tune.cpp.columns import ColumnPrinter, Shape, Work
from tune_model.tune.cpp.emit import EXPORTED, Printed, Sizes, check_types, declare_slots
from tune_model.tune.cpp.scope import Facts, Scope
from tune_model.tune.loops.epilogue import Epilogue
from tune_model.tune.loops.graph import along_columns
from tune_model.tune.loops.ir import Access, Load, LoopNest
from tune_model.tune.loops.rounding import elide_rounding

__all__ = ["MOST_ROWS", "GemvShape", "print_gemv"]

MOST_ROWS: Final = 4
_ELEMENTS: Final = {"float32": "float", "bfloat16": "BFloat16", "float16": "Float16"}


class GemvShape(msgspec.Struct, frozen=True):
    """Choices that the numbers do not depend on (beyond the order of sums).

    Attributes:
        rows: Rows of the weight read side by side.
        unroll: Independent sums per dot product.
        block: Columns of the result per work item.
    """

    rows: int = 4
    unroll: int = 1
    block: int = 32


def print_gemv(parts: Epilogue, shape: GemvShape) -> Printed:
    """Print a matmul form; its right operand has unit stride along k, and so has the left.

    Raises:
        Unprintable: An element type that C++ does not hold.
    """
    nest = _on_local_sums(elide_rounding(parts.nest))
    check_types(nest)
    sizes = Sizes()
    facts = Facts(nest, along_columns(nest, 1), 1, sizes)
    row = Scope(facts)
    printer = ColumnPrinter(facts, Shape(unroll=1), {})
    columns = printer.stretch(row, Work(stores=tuple(range(len(nest.stores)))), ("first", "last"), None)
    epilogue = [*row.lines, *columns]

    slots = declare_slots(nest)
    locals_ = [a.slot for a in parts.accumulators]
    outside = [s for s in slots if s not in locals_]
    element = _ELEMENTS[parts.dtype]
    pointers = (parts.a.slot, parts.b.slot, *outside)
    declared = [
        slots[s].split(" = ")[0] + f" = ({_type_of(slots[s])})pointers[{2 + k}];" for k, s in enumerate(outside)
    ]
    a_stride, w_stride = _stride(parts.a, 0, sizes), _stride(parts.b, 1, sizes)
    rows = sizes(parts.m.extent)
    x_offset, w_offset = sizes(parts.a.offset), sizes(parts.b.offset)
    copy = parts.dtype != "float32"
    lines = [
        "namespace {",
        "template <int M>",
        "void tile(void *const *pointers, const int64_t *sizes, int64_t begin, int64_t end) {",
        *sizes.declared(),
        f"const {element} *const left = (const {element} *)pointers[0] + {x_offset};",
        f"const {element} *const weight = (const {element} *)pointers[1] + {w_offset};",
        *declared,
        *([f"alignas(64) float copy[M * {parts.k}];"] if copy else []),
        f"const float *const x = as_floats(left, M, {a_stride}, {parts.k}, {'copy' if copy else 'nullptr'});",
        f"alignas(64) float sums[{len(locals_)}][M][{shape.block}];",
        "for (int64_t item = begin; item < end; ++item) {",
        f"const int64_t first = item * {shape.block};",
        f"const int64_t last = first + {shape.block} < {parts.n} ? first + {shape.block} : {parts.n};",
    ]
    for k, accumulator in enumerate(parts.accumulators):
        start = f"(first + {accumulator.column})" if accumulator.column else "first"
        lines.append(
            f"columns<M, {shape.rows}, {shape.unroll}>(x, {parts.k if copy else a_stride}, "
            f"weight + {start} * {w_stride}, {w_stride}, {parts.k}, last - first, sums[{k}][0], {shape.block});"
        )
    lines.append("for (int64_t i0 = 0; i0 < M; ++i0) {")
    lines += [f"const float *const {s} = sums[{k}][i0] - first;" for k, s in enumerate(locals_)]
    lines += [*epilogue, "}", "}", "}"]
    lines += [
        "void run(void *const *pointers, const int64_t *sizes, int64_t begin, int64_t end) {",
        *sizes.declared(),
        f"switch ({rows}) {{",
        *(f"case {m}: return tile<{m}>(pointers, sizes, begin, end);" for m in range(1, MOST_ROWS + 1)),
        "}",
        "}",
        "}  // namespace",
        f"{EXPORTED} void entry(void *const *pointers, const int64_t *sizes) {{",
        f"parallel(run, pointers, sizes, {-(-parts.n // shape.block)}, {_grain(parts, shape)});",
        "}",
    ]
    return Printed("\n".join(lines) + "\n", pointers, tuple(sizes.known))


def _grain(parts: Epilogue, shape: GemvShape) -> int:
    """Return how many items are worth a thread: 128 KB of the weight."""
    size = 4 if parts.dtype == "float32" else 2
    return max(1, (1 << 17) // (shape.block * parts.k * size * len(parts.accumulators)))


def _stride(access: Access, axis: int, sizes: Sizes) -> str:
    stride: Dim = access.strides[axis]
    return sizes(stride)


def _type_of(declaration: str) -> str:
    return declaration.split(" *const ", maxsplit=1)[0] + " *"


def _on_local_sums(nest: LoopNest) -> LoopNest:
    """Read accumulators as rows that start at the tile's first column."""
    nodes = tuple(
        Load(Access(n.access.slot, (0, 1), 0), n.dtype, n.where, n.gather)
        if isinstance(n, Load) and n.access.slot.startswith("acc")
        else n
        for n in nest.nodes
    )
    return LoopNest(nest.axes, nest.inner, nodes, nest.stores, nest.requires)
