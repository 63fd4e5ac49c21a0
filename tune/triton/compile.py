"""From a `@triton.jit` function to a cubin with no GPU and no driver, or to the reason why not.

Runs in a build process. The cubin's bytes depend on the function, its specialisation, the options and Triton's version
only: line information is off, so paths do not enter, and no cache of the user's is read or written: tasks that share a
kernel find it in the run's own (`scratch`).
"""

import contextlib
import os
import re
import tempfile
import time
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from tune_model.tune.building.scratch import compiler_cache
from tune_model.tune.candidate import Rejected
from tune_model.tune.target import CudaTarget
from tune_model.tune.triton.cubin import read_usage

__all__ = ["Binary", "Options", "Source", "compile_kernel"]

SPILL_LIMIT_BYTES = 512
"""Local memory per thread above which a kernel is not worth a measurement; a few spilled registers are."""

_WORKSPACE_ALIGNMENT = 256
"""In bytes, of every workspace: torch's allocator on CUDA aligns to 512."""

_DETAIL_CHARACTERS = 600


class Source(NamedTuple):
    """A specialised kernel, in the terms of `triton.compiler.ASTSource`.

    Attributes:
        function: The `@triton.jit` function.
        signature: Type of every argument by name: `*bf16`, `i32`, `constexpr`, or a tuple of such.
        constants: Values of constexpr arguments by index path.
        attributes: What the compiler may assume, by index path: `[["tt.divisibility", 16]]`.
    """

    function: Any
    signature: Mapping[str, Any]
    constants: Mapping[tuple[int, ...], Any]
    attributes: Mapping[tuple[int, ...], list[list[Any]]]


class Options(NamedTuple):
    """Compiler options that a configuration may choose.

    Attributes:
        num_warps: Threads per block / 32, as asked for.
        num_stages: Depth of the software pipeline of loops that feed `tl.dot`.
        registers: Most registers per thread; `None` leaves it to ptxas.
        programmatic: Allow the grid-dependency instructions.
    """

    num_warps: int = 4
    num_stages: int = 3
    registers: int | None = None
    programmatic: bool = False


class Binary(NamedTuple):
    """A compiled kernel.

    Attributes:
        cubin: Machine code.
        entry: Name of its function.
        num_warps: What to launch with; the compiler may have added warps.
        shared_bytes: Dynamic shared memory per block.
        scratch_bytes: Global memory per block, for tensor descriptors.
        registers: Per thread.
        spill_bytes: Local memory per thread.
        seconds: What compiling took.
    """

    cubin: bytes
    entry: str
    num_warps: int
    shared_bytes: int
    scratch_bytes: int
    registers: int
    spill_bytes: int
    seconds: float


def compile_kernel(source: Source, options: Options, target: CudaTarget) -> Binary | Rejected:
    """Compile for `target.arch`; a kernel that the compiler or the device's limits refuse is a `Rejected`."""
    # Triton reports through exceptions of many types (its own, RuntimeError from MLIR, subprocess errors from ptxas,
    # assertion failures in user-facing checks); all of them mean the same here.
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    started = time.perf_counter()
    ast = ASTSource(source.function, dict(source.signature), dict(source.constants), dict(source.attributes))
    chosen: dict[str, Any] = {
        "num_warps": options.num_warps,
        "num_stages": options.num_stages,
        "enable_fp_fusion": True,
        "launch_pdl": options.programmatic,
    }
    if options.registers is not None:
        chosen["maxnreg"] = options.registers
    with _isolated(), _captured_stderr() as said:
        try:
            kernel = triton.compile(ast, target=GPUTarget("cuda", target.arch, 32), options=chosen)
        except Exception as error:  # noqa: BLE001 (see above)
            return Rejected("compiler", _explain(error, said()))
        metadata, cubin = kernel.metadata, bytes(kernel.asm["cubin"])
    seconds = time.perf_counter() - started
    return _within_limits(metadata, cubin, seconds, target)


def _within_limits(metadata: Any, cubin: bytes, seconds: float, target: CudaTarget) -> Binary | Rejected:
    if metadata.shared > target.shared_bytes:
        return Rejected("shared memory", f"needs {metadata.shared} bytes, limit {target.shared_bytes}")
    if getattr(metadata, "profile_scratch_size", 0):
        return Rejected("unsupported", f"needs {metadata.profile_scratch_size} bytes to profile itself")
    scratch = metadata.global_scratch_size
    if scratch and _WORKSPACE_ALIGNMENT % metadata.global_scratch_align:
        return Rejected("unsupported", f"needs global scratch aligned to {metadata.global_scratch_align} bytes")
    usage = read_usage(cubin)
    threads = metadata.num_warps * 32
    if usage.registers * threads > target.registers_per_sm:
        return Rejected(
            "registers",
            f"needs {usage.registers} x {threads} threads, limit {target.registers_per_sm} per multiprocessor",
        )
    if usage.local_bytes > SPILL_LIMIT_BYTES:
        return Rejected("spills", f"{usage.local_bytes} bytes of local memory per thread, limit {SPILL_LIMIT_BYTES}")
    return Binary(
        cubin,
        metadata.name,
        metadata.num_warps,
        metadata.shared,
        scratch,
        usage.registers,
        usage.local_bytes,
        seconds,
    )


@contextlib.contextmanager
def _isolated() -> Iterator[None]:
    """Give Triton a cache of our own and fix the switches that change code, whatever the environment says."""
    from triton import knobs

    shared = compiler_cache()
    with (
        tempfile.TemporaryDirectory(prefix="tune-model-") as alone,
        knobs.cache.scope(),
        knobs.compilation.scope(),
        knobs.runtime.scope(),
    ):
        knobs.cache.dir = alone if shared is None else str(shared)
        knobs.compilation.disable_line_info = True
        knobs.compilation.override = False
        knobs.compilation.dump_ir = False
        knobs.compilation.always_compile = shared is None
        knobs.compilation.store_binary_only = True
        knobs.runtime.debug = False
        yield


@contextlib.contextmanager
def _captured_stderr() -> Iterator[Any]:
    """Divert file descriptor 2, which MLIR and ptxas write to directly; yields a function that returns what came."""
    with tempfile.TemporaryFile() as file:
        saved = os.dup(2)
        os.dup2(file.fileno(), 2)

        def said() -> str:
            file.seek(0)
            return file.read(1 << 20).decode(errors="replace")

        try:
            yield said
        finally:
            os.dup2(saved, 2)
            os.close(saved)


def _explain(error: Exception, said: str) -> str:
    """Keep the lines that name the error; an MLIR dump runs to thousands."""
    telling = re.compile(r"\b(error|failed|assert\w*|fatal)\b", re.IGNORECASE)
    lines = [line.strip() for line in said.splitlines() if telling.search(line)]
    cause = error.__cause__
    # Of an error in a kernel's source Triton prints the source first, which may be long.
    message = getattr(error, "error_message", None) or error
    parts = [f"{type(error).__name__}: {message}", *([f"{type(cause).__name__}: {cause}"] if cause else []), *lines[:5]]
    return " | ".join(part[:_DETAIL_CHARACTERS] for part in parts)[: 3 * _DETAIL_CHARACTERS]
