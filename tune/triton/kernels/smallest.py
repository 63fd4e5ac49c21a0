"""A kernel that every compiler that works can compile: it tells a broken compiler from one that refuses a kernel."""

import triton
import triton.language as tl


@triton.jit
def add_one(pointer, COUNT: tl.constexpr):
    """Add 1 to COUNT numbers."""
    at = tl.arange(0, COUNT)
    tl.store(pointer + at, tl.load(pointer + at) + 1.0)
