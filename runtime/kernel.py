"""What a tuned kernel is at run time: machine code by hash, how to launch it, and when that is legal.

A `Kernel` is a short list of steps over a form's slots (`a0`, `t3`, workspaces `ws0`): launches of cubins or shared
libraries and ATen calls, so a two-pass split-K, a cuBLAS call followed by a generated epilogue and the plain ATen
baseline are all kernels. Sizes in launch facts are expressions over the *actual* layout of the slots, written
`a0.size1` and `a0.stride0`, so a kernel tuned at one size says by itself for which others it is legal.
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


KernelStep = CudaLaunch | CpuLaunch | Call


class Workspace(msgspec.Struct, frozen=True, omit_defaults=True):
    """Scratch memory, contiguous; its contents before the first step are undefined unless `zeroed`."""

    name: str
    dtype: str
    size: Dim
    zeroed: bool = False


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
