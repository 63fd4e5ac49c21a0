"""What a tuned kernel is at run time: machine code by hash, how to launch it, and when that is legal.

A `Kernel` is a short list of steps over a form's slots (`a0`, `t3`, workspaces `ws0`): launches of cubins or shared
libraries, products by a chosen algorithm of cuBLASLt, and ATen calls. So a two-pass split-K, a library call followed by
a generated epilogue and the plain ATen baseline are all kernels. Sizes in launch facts are expressions over the actual
layout of the slots, written `a0.size1` and `a0.stride0`, so a kernel tuned at one size says by itself for which others
it is legal.
Types only.
"""

from typing import Literal

import msgspec

from tune_model.runtime.expression import Dim
from tune_model.runtime.program import Call

__all__ = [
    "Aligned",
    "CpuLaunch",
    "CudaLaunch",
    "Integer",
    "Kernel",
    "KernelArgument",
    "KernelStep",
    "LibraryAlgorithm",
    "LibraryMatmul",
    "Multiple",
    "Null",
    "Pointer",
    "Requirement",
    "Scalar",
    "Within",
    "Workspace",
]


class Pointer(msgspec.Struct, frozen=True, tag="pointer"):
    """The address of a slot's first element."""

    slot: str


class Integer(msgspec.Struct, frozen=True, tag="integer", omit_defaults=True):
    """An integer argument."""

    expression: Dim
    bits: Literal[32, 64] = 32


class Scalar(msgspec.Struct, frozen=True, tag="scalar"):
    """A float32 argument."""

    value: float


class Null(msgspec.Struct, frozen=True, tag="null"):
    """A null pointer (Triton's scratch pointers when their size is 0)."""


KernelArgument = Pointer | Integer | Scalar | Null


class CudaLaunch(msgspec.Struct, frozen=True, tag="cuda", omit_defaults=True):
    """One launch of a cubin's entry.

    Attributes:
        code: SHA-256 of the cubin.
        entry: Name of the function in it.
        grid: Blocks in x, y, z; a launch with a 0 in it is skipped.
        num_warps: Threads per block / 32.
        shared_bytes: Dynamic shared memory per block.
        arguments: In the order of the cubin's parameters.
        cluster: Blocks per cluster.
        programmatic: Launch with programmatic stream serialisation (the kernel waits for its predecessor itself).
    """

    code: str
    entry: str
    grid: tuple[Dim, Dim, Dim]
    num_warps: int
    shared_bytes: int
    arguments: tuple[KernelArgument, ...]
    cluster: tuple[int, int, int] = (1, 1, 1)
    programmatic: bool = False


class CpuLaunch(msgspec.Struct, frozen=True, tag="cpu", omit_defaults=True):
    """One call into a shared library: `void entry(void *const *pointers, const int64_t *sizes)`.

    Attributes:
        code: SHA-256 of the library.
        entry: Exported symbol.
        pointers: Slots.
        sizes: Integers.
    """

    code: str
    entry: str
    pointers: tuple[str, ...]
    sizes: tuple[Dim, ...] = ()


class LibraryAlgorithm(msgspec.Struct, frozen=True, omit_defaults=True):
    """One of cuBLASLt's kernels, by the values of `cublasLtMatmulAlgoConfigAttributes_t`."""

    id: int
    tile: int = 0
    stages: int = 0
    split_k: int = 1
    reduction: int = 0
    swizzle: int = 0
    custom: int = 0
    inner_shape: int = 0
    cluster_shape: int = 0


class LibraryMatmul(msgspec.Struct, frozen=True, tag="cublaslt", omit_defaults=True):
    """One product by a chosen algorithm of cuBLASLt: `result[m, n] = a[m, k] @ b[k, n] + bias[n]`, rows contiguous.

    Attributes:
        a: Slot of the left operand.
        b: Slot of the right operand.
        result: Slot that is written.
        m: Rows of `a`.
        n: Columns of `b`.
        k: Length of the dot products.
        a_stride: Elements from one row of `a` to the next.
        b_stride: Elements from one row of `b` to the next; with `b_by_columns` from one column to the next.
        dtype: Of all operands; sums are float32.
        algorithm: Which.
        version: Of the library that it means this kernel in; with any other the kernel is not legal.
        b_by_columns: Elements of a column of `b` are adjacent, as in a linear layer's weight [n, k].
        tf32: float32 operands may be rounded to tf32.
        bias: Slot of a vector.
        workspace: Workspace slot.
        workspace_bytes: Its size.
    """

    a: str
    b: str
    result: str
    m: Dim
    n: Dim
    k: Dim
    a_stride: Dim
    b_stride: Dim
    dtype: Literal["float32", "float16", "bfloat16"]
    algorithm: LibraryAlgorithm
    version: int
    b_by_columns: bool = False
    tf32: bool = False
    bias: str | None = None
    workspace: str | None = None
    workspace_bytes: int = 0


KernelStep = CudaLaunch | CpuLaunch | LibraryMatmul | Call


class Workspace(msgspec.Struct, frozen=True, omit_defaults=True):
    """Scratch memory, contiguous; its contents before the first step are undefined unless `zeroed` or `counters`.

    Attributes:
        name: Slot.
        dtype: Of its elements.
        size: How many.
        zeroed: Set to zero before every call.
        counters: Zero at the first call, and every call leaves it so; no two calls in flight share it.
    """

    name: str
    dtype: str
    size: Dim
    zeroed: bool = False
    counters: bool = False


class Within(msgspec.Struct, frozen=True, tag="within"):
    """`low <= expression <= high`; equal bounds state a fixed size."""

    expression: Dim
    low: int
    high: int


class Multiple(msgspec.Struct, frozen=True, tag="multiple"):
    """The expression is divisible by `of`."""

    expression: Dim
    of: int


class Aligned(msgspec.Struct, frozen=True, tag="aligned"):
    """The slot's address is divisible by `size_bytes`."""

    slot: str
    size_bytes: int


Requirement = Within | Multiple | Aligned


class Kernel(msgspec.Struct, frozen=True, omit_defaults=True):
    """An executable implementation of a form.

    Attributes:
        steps: In order; an ATen call's results may be slots of the form's results.
        workspaces: Scratch slots.
        layouts: For weight slots that must be re-laid out: (slot, layout), layout as in `Pack`, or `transposed`.
        requires: All must hold for a call to be legal.
    """

    steps: tuple[KernelStep, ...]
    workspaces: tuple[Workspace, ...] = ()
    layouts: tuple[tuple[str, str], ...] = ()
    requires: tuple[Requirement, ...] = ()
