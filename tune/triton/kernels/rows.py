"""The grids of generated row and pointwise functions: where a program's rows or elements begin.

What happens to them is the generated function's; `tune/triton/row_source` prints it.
"""

import triton
import triton.language as tl

from tune_model.tune.triton.kernels.dependency import wait_for_predecessor


@triton.jit
def rows(operands, row_count, ROWS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr, BODY: tl.constexpr):
    """Give each program ROWS consecutive rows; BLOCK columns are held at a time."""
    wait_for_predecessor(PDL)
    first = tl.program_id(0) * ROWS
    BODY((first + tl.arange(0, ROWS))[:, None], row_count, operands, BLOCK)


@triton.jit
def pointwise(operands, count, BLOCK: tl.constexpr, PDL: tl.constexpr, BODY: tl.constexpr):
    """Give each program BLOCK consecutive elements of the flattened index space."""
    wait_for_predecessor(PDL)
    first = tl.program_id(0) * BLOCK
    BODY(first + tl.arange(0, BLOCK), count, operands)
