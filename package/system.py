"""What machine this process runs on, as far as an artifact's fingerprints ask. Needs torch and nothing else.

Probes only; what follows from the answers is in `fingerprints`. Starts no process and imports no compiler.
"""

import platform
import re
from pathlib import Path
from typing import TYPE_CHECKING, Final

from tune_model.package.fingerprints import CpuSystem, CudaSystem, System
from tune_model.runtime.errors import TuneModelError
from tune_model.tune.measuring.nvml import Nvml

if TYPE_CHECKING:
    import torch

__all__ = ["DeviceError", "choose_device", "probe_system"]

CPUINFO: Final = Path("/proc/cpuinfo")


class DeviceError(TuneModelError):
    """The device that was asked for is not there."""


def choose_device(device: "str | torch.device | None", wanted: str) -> "torch.device":
    """Return the device to load on.

    Args:
        device: The caller's choice; `None` takes the first of the kind the artifact was tuned for.
        wanted: `cuda` or `cpu`.

    Raises:
        DeviceError: The name is no device, or one of another kind, or this machine has none of that kind.
    """
    import torch

    try:
        chosen = torch.device(wanted if device is None else device)
    except RuntimeError as error:
        raise DeviceError(f"device is {device!r}; expected cpu, cuda or cuda:N") from error
    if chosen.type not in {"cpu", "cuda"}:  # torch has others; what was tuned runs on none of them
        raise DeviceError(f"device is {str(chosen)!r}; expected cpu, cuda or cuda:N")
    if chosen.type == "cuda":
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if max(0, chosen.index or 0) >= count:
            what = f"torch {torch.__version__} sees {count} NVIDIA GPUs"
            raise DeviceError(f"device {str(chosen)!r} is not there: {what}; an artifact tuned for a GPU needs one")
    return chosen


def probe_system(device: "str | torch.device") -> System:
    """Describe the machine behind a device."""
    import torch

    chosen = torch.device(device)
    version = ".".join(torch.__version__.split(".")[:2])
    if chosen.type == "cuda":
        return _probe_cuda(chosen, version)
    flags, name = read_cpuinfo(CPUINFO.read_text(encoding="utf-8", errors="replace") if CPUINFO.exists() else "")
    return CpuSystem(platform.machine(), flags, name or platform.machine(), torch.get_num_threads(), version)


def read_cpuinfo(text: str) -> tuple[frozenset[str], str]:
    """Return the instruction-set flags and the model name that /proc/cpuinfo gives for its first processor."""
    fields = dict(re.findall(r"^([^\t:\n]+)\t*: ?(.*)$", text.split("\n\n", maxsplit=1)[0], re.MULTILINE))
    return frozenset((fields.get("flags") or fields.get("Features") or "").split()), fields.get(
        "model name", ""
    ).strip()


def _probe_cuda(device: "torch.device", version: str) -> CudaSystem:
    import torch

    facts = torch.cuda.get_device_properties(device)
    nvml = Nvml(str(facts.uuid))
    driver = nvml.driver_version()
    return CudaSystem(
        arch=facts.major * 10 + facts.minor,
        name=facts.name,
        sm_count=facts.multi_processor_count,
        torch=version,
        max_clock_mhz=nvml.max_clock_mhz(),
        driver_branch=None if driver is None else driver.split(".", maxsplit=1)[0],
    )
