"""Programmatic dependent launch: a kernel starts while its predecessor drains, and waits itself before it reads.

Every kernel launched this way waits before it uses what is in memory, so whatever the predecessor did is complete and
visible. What it may do before is ask the second-level cache, which is always right, for what it will read: weights, or
keys and values. So memory stays busy between two kernels. Where it has to read something to know what to ask for, that
may be an old value: it is read past the first-level cache, kept within the operand's bounds, used for nothing else, and
read again after the wait. Hopper and later. Inline instructions, so behind constexprs that are off in Triton's
interpreter.
"""

import triton
import triton.language as tl
from triton.language.extra import cuda

_PREFETCH: tl.constexpr = tl.constexpr("""
{
    .reg .pred p;
    .reg .u32 thread;
    mov.u32 thread, %tid.x;
    setp.lt.u32 p, thread, $3;
    @p cp.async.bulk.prefetch.L2.global [$1], $2;
    mov.u32 $0, 0;
}
""")


@triton.jit
def wait_for_predecessor(PDL: tl.constexpr):
    """Let the next kernel's blocks come in, then wait until everything before this kernel is done."""
    if PDL:
        cuda.gdc_launch_dependents()
        cuda.gdc_wait()


_MULTIPROCESSORS: tl.constexpr = tl.constexpr("mov.u32 $0, %nsmid;")


@triton.jit
def starts_early():
    """Say whether this program may be on the device before its predecessor is done: those behind it find it done.

    By threads alone: a multiprocessor has 2048 at most, whatever else limits what it holds.
    """
    multiprocessors = tl.inline_asm_elementwise(_MULTIPROCESSORS, "=r", [], dtype=tl.int32, is_pure=True, pack=1)
    return tl.program_id(0) < multiprocessors * (2048 // cuda.num_threads())


@triton.jit
def ask(pointers, sizes, wanted, COUNT: tl.constexpr):
    """Ask the second-level cache for so many bytes from each of COUNT addresses that is wanted; waits for nothing.

    Addresses and sizes are multiples of 16.
    """
    counts = tl.where(wanted, COUNT, 0)
    tl.inline_asm_elementwise(
        _PREFETCH, "=r,l,r,r", [pointers.to(tl.int64), sizes, counts], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def prefetch_weights(
    w,
    column,
    first,
    STRIDE_N: tl.constexpr,
    STRIDE_K: tl.constexpr,
    N: tl.constexpr,
    HALVES: tl.constexpr,
    BLOCK_N: tl.constexpr,
    AHEAD: tl.constexpr,
):
    """Ask for the first AHEAD elements of k, from `first` on, of the BLOCK_N columns from `column` on, of each half."""
    element: tl.constexpr = w.dtype.element_ty.primitive_bitwidth // 8
    if starts_early():
        if STRIDE_K == 1:
            columns = column + tl.arange(0, BLOCK_N)
            if N % BLOCK_N != 0:
                columns = columns % N
            begin = w + columns.to(tl.int64) * STRIDE_N + first
            all_columns = columns >= 0
            sizes = tl.full((BLOCK_N,), AHEAD * element, tl.int32)
            ask(begin, sizes, all_columns, BLOCK_N)
            if HALVES == 2:
                ask(begin + N * STRIDE_N, sizes, all_columns, BLOCK_N)
        else:
            ks = first + tl.arange(0, AHEAD)
            begin = w + ks.to(tl.int64) * STRIDE_K + column
            all_rows = ks >= 0
            sizes = tl.full((AHEAD,), BLOCK_N * element, tl.int32)
            ask(begin, sizes, all_rows, AHEAD)
            if HALVES == 2:
                ask(begin + N, sizes, all_rows, AHEAD)
