"""What NVIDIA GPU this machine has, and typical ones to plan and compile for without one."""

from importlib.metadata import PackageNotFoundError, version
from typing import Any, Final

import torch

from tune_model.tune.measuring.nvml import Nvml
from tune_model.tune.target import CudaTarget, TargetError

__all__ = ["has_gpu", "is_offline", "offline_cuda", "probe_cuda", "require_gpu"]

_TYPICAL: Final = {
    # From NVIDIA's tuning guides and data sheets: SMs, L2, dynamic shared memory of a block, memory, clock.
    80: ("NVIDIA A100", 108, 40 << 20, 166912, 80 << 30, 1410),
    86: ("NVIDIA A10", 72, 6 << 20, 101376, 24 << 30, 1695),
    89: ("NVIDIA L40S", 142, 96 << 20, 101376, 48 << 30, 2520),
    90: ("NVIDIA H200", 132, 60 << 20, 232448, 141 << 30, 1980),
    100: ("NVIDIA B200", 148, 126 << 20, 232448, 180 << 30, 1965),
    120: ("NVIDIA RTX PRO 6000", 188, 128 << 20, 101376, 96 << 30, 2617),
}

_OFFLINE: Final = "offline"


def has_gpu() -> bool:
    """Say whether torch can use an NVIDIA GPU here."""
    return torch.cuda.is_available() and torch.version.hip is None


def probe_cuda(index: int) -> CudaTarget:
    """Describe a GPU of this machine.

    Args:
        index: Torch's number for it.

    Raises:
        TargetError: There is none.
    """
    if not has_gpu():
        msg = (
            f"the target is cuda, but torch {torch.__version__} sees no NVIDIA GPU; use target cpu, run on a machine "
            "with a GPU and its driver, or plan for one with cuda:sm_90"
        )
        raise TargetError(msg)
    if index >= torch.cuda.device_count():
        raise TargetError(f"GPU {index} does not exist; torch sees {torch.cuda.device_count()}")
    facts: Any = torch.cuda.get_device_properties(index)
    nvml = Nvml(str(facts.uuid))
    driver = nvml.driver_version()
    return CudaTarget(
        arch=facts.major * 10 + facts.minor,
        name=facts.name,
        sm_count=facts.multi_processor_count,
        l2_bytes=facts.L2_cache_size,
        shared_bytes=facts.shared_memory_per_block_optin,
        registers_per_sm=facts.regs_per_multiprocessor,
        memory_bytes=facts.total_memory,
        max_clock_mhz=nvml.max_clock_mhz() or 0,
        driver_branch="unknown" if driver is None else driver.split(".", maxsplit=1)[0],
        cublas=_cublas_version(),
        torch=_minor(torch.__version__),
        triton=_package_minor("triton"),
    )


def offline_cuda(arch: int) -> CudaTarget:
    """Return a typical GPU of an architecture, to plan and compile for.

    Raises:
        TargetError: The architecture is not known here.
    """
    if arch not in _TYPICAL:
        known = ", ".join(f"cuda:sm_{a}" for a in sorted(_TYPICAL))
        raise TargetError(f"target is cuda:sm_{arch}; expected one of {known}, or cuda on a machine with a GPU")
    name, sm_count, l2_bytes, shared_bytes, memory_bytes, clock = _TYPICAL[arch]
    return CudaTarget(
        arch,
        name,
        sm_count,
        l2_bytes,
        shared_bytes,
        65536,
        memory_bytes,
        clock,
        _OFFLINE,
        _OFFLINE,
        _minor(torch.__version__),
        _package_minor("triton"),
    )


def is_offline(target: CudaTarget) -> bool:
    """Say whether a target is a typical GPU, not one that was found."""
    return target.driver_branch == _OFFLINE


def require_gpu(target: CudaTarget, index: int) -> None:
    """Make sure that a target is the GPU with this number.

    Raises:
        TargetError: It is another one, or none.
    """
    if is_offline(target):
        msg = (
            f"cannot measure for {target.name} (sm_{target.arch}): this machine has no such GPU; plan only, or tune on "
            "a machine that has one"
        )
        raise TargetError(msg)
    found = probe_cuda(index)
    if (found.arch, found.name) != (target.arch, target.name):
        raise TargetError(
            f"GPU {index} is {found.name} (sm_{found.arch}); the target is {target.name} (sm_{target.arch})"
        )


def _minor(text: str) -> str:
    return ".".join(text.split("+", maxsplit=1)[0].split(".")[:2])


def _package_minor(name: str) -> str:
    try:
        return _minor(version(name))
    except PackageNotFoundError:
        return "none"


def _cublas_version() -> str:
    """Return cuBLAS's version as the package that torch brings it in states it."""
    for name in ("nvidia-cublas", "nvidia-cublas-cu13", "nvidia-cublas-cu12"):
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    return f"cuda-{torch.version.cuda}"
