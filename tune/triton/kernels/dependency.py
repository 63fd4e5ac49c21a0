"""Programmatic dependent launch: a kernel starts while its predecessor drains, and waits itself before it reads.

Every kernel launched this way waits first thing, so whatever the predecessor did, its memory is complete and visible.
Hopper and later. Inline instructions, so behind a constexpr that is off in Triton's interpreter.
"""

import triton
import triton.language as tl
from triton.language.extra import cuda


@triton.jit
def wait_for_predecessor(PDL: tl.constexpr):
    """Let the next kernel's blocks come in, then wait until everything before this kernel is done."""
    if PDL:
        cuda.gdc_launch_dependents()
        cuda.gdc_wait()
