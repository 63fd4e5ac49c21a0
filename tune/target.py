"""The machine that is tuned for: what candidates need to know of it, and the two fingerprints.

Probing is in `probe`; this is what the probes return.
"""

import msgspec

from tune_model.runtime.errors import TuneModelError

__all__ = ["CpuTarget", "CudaTarget", "Target", "TargetError"]


class TargetError(TuneModelError):
    """The target is unknown, or this machine is not it."""


class CudaTarget(msgspec.Struct, frozen=True, tag="cuda"):
    """An NVIDIA GPU.

    Attributes:
        arch: Compute capability times ten: 90.
        name: Marketing name as the driver says it.
        sm_count: Streaming multiprocessors.
        l2_bytes: Second-level cache.
        shared_bytes: Largest dynamic shared memory a block may opt in to.
        registers_per_sm: 32-bit registers.
        memory_bytes: Device memory.
        max_clock_mhz: Highest SM clock.
        driver_branch: `580`.
        cublas: Library version; the result of library calls depends on it.
        torch: Minor version: `2.11`.
        triton: Minor version: `3.6`.
    """

    arch: int
    name: str
    sm_count: int
    l2_bytes: int
    shared_bytes: int
    registers_per_sm: int
    memory_bytes: int
    max_clock_mhz: int
    driver_branch: str
    cublas: str
    torch: str
    triton: str


class CpuTarget(msgspec.Struct, frozen=True, tag="cpu"):
    """A CPU.

    Attributes:
        machine: `x86_64` or `aarch64`.
        isa: Sorted instruction-set flags the generated code may use: `avx2`, `avx512_bf16`, `fma`.
        name: Model name.
        threads: Threads that kernels run with.
        l2_bytes: Per core.
        l3_bytes: Shared.
        compiler: `g++ 12.2`.
        torch: Minor version.
    """

    machine: str
    isa: tuple[str, ...]
    name: str
    threads: int
    l2_bytes: int
    l3_bytes: int
    compiler: str
    torch: str


Target = CudaTarget | CpuTarget
