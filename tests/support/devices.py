"""Machines to build for, and the one the tests run on."""

import torch
import triton

from tune_model.tune.target import CudaTarget

_SHARED_BYTES = {80: 166912, 89: 101376, 90: 232448, 100: 232448}


def cuda_target(arch: int = 90) -> CudaTarget:
    """A GPU of an architecture, with that architecture's limits."""
    return CudaTarget(
        arch=arch,
        name=f"sm_{arch}",
        sm_count=132,
        l2_bytes=50 << 20,
        shared_bytes=_SHARED_BYTES[arch],
        registers_per_sm=65536,
        memory_bytes=141 << 30,
        max_clock_mhz=1980,
        driver_branch="580",
        cublas="13",
        torch=".".join(torch.__version__.split(".")[:2]),
        triton=".".join(triton.__version__.split(".")[:2]),
    )


def current_cuda_target() -> CudaTarget:
    """This machine's first GPU."""
    properties = torch.cuda.get_device_properties(0)
    return CudaTarget(
        arch=properties.major * 10 + properties.minor,
        name=properties.name,
        sm_count=properties.multi_processor_count,
        l2_bytes=properties.L2_cache_size,
        shared_bytes=properties.shared_memory_per_block_optin,
        registers_per_sm=properties.regs_per_multiprocessor,
        memory_bytes=properties.total_memory,
        max_clock_mhz=1980,
        driver_branch="",
        cublas="",
        torch=".".join(torch.__version__.split(".")[:2]),
        triton=".".join(triton.__version__.split(".")[:2]),
    )
