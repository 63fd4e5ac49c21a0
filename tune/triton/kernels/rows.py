"""The grids of generated row and pointwise functions: where a program's rows or elements begin.

What happens to them is the generated function's; `tune/triton/row_source` prints it.
"""

import triton
import triton.language as tl

from tune_model.tune.triton.kernels.dependency import wait_for_predecessor


@triton.jit
def consecutive(first, ROWS: tl.constexpr):
    """Return the numbers of ROWS rows, as a column; of one row as a vector, like everything that is printed for it."""
    if ROWS == 1:
        return first + tl.arange(0, 1)
    else:  # noqa: RET505 (Triton evaluates both branches' types otherwise)
        return (first + tl.arange(0, ROWS))[:, None]


@triton.jit
def rows(operands, row_count, ROWS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr, BODY: tl.constexpr):
    """Give each program ROWS consecutive rows; BLOCK columns are held at a time."""
    wait_for_predecessor(PDL)
    first = tl.program_id(0) * ROWS
    BODY(consecutive(first, ROWS), row_count, operands, BLOCK)


@triton.jit
def split_rows(
    operands,
    row_count,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    SPAN: tl.constexpr,
    PDL: tl.constexpr,
    BODY: tl.constexpr,
):
    """Give each program SPAN columns of ROWS consecutive rows."""
    wait_for_predecessor(PDL)
    first = tl.program_id(0) * ROWS
    split = tl.program_id(1)
    BODY(consecutive(first, ROWS), row_count, operands, split * SPAN, split, SPAN, BLOCK)


@triton.jit
def pointwise(operands, count, BLOCK: tl.constexpr, PDL: tl.constexpr, BODY: tl.constexpr):
    """Give each program BLOCK consecutive elements of the flattened index space."""
    wait_for_predecessor(PDL)
    first = tl.program_id(0) * BLOCK
    BODY(first + tl.arange(0, BLOCK), count, operands)
