"""The little that is asked of NVIDIA's management library: driver version, highest clock, throttling, memory errors.

Through ctypes, so that no package is needed and no process is started. What it does not answer is `None`.
"""

import ctypes
from typing import Any, Final

__all__ = ["Nvml"]

_CLOCK_SM: Final = 1

_SLOWED: Final = 0x8 | 0x20 | 0x40 | 0x80
"""Hardware slowdown, software thermal slowdown, hardware thermal slowdown, power brake (NVML's event reasons).

The power cap (0x4) is not among them: a large matmul at its limit is what a deployment sees as well.
"""


_CORRECTED: Final = 0
_UNCORRECTED: Final = 1
_SINCE_LOADED: Final = 0
"""NVML's memory error types, and its volatile counter."""


class Nvml:
    """One GPU as NVML sees it; found by its identity, since torch's order of devices is not NVML's."""

    def __init__(self, uuid: str) -> None:
        """Connect.

        Args:
            uuid: As CUDA gives it, without the prefix `GPU-`.
        """
        self._library = _load()
        self._handle: ctypes.c_void_p | None = None
        if self._library is not None:
            handle = ctypes.c_void_p()
            if self._library.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}".encode(), ctypes.byref(handle)) == 0:
                self._handle = handle

    def driver_version(self) -> str | None:
        """Return the driver's version, `580.159.03`."""
        text = ctypes.create_string_buffer(96)
        if self._library is None or self._library.nvmlSystemGetDriverVersion(text, len(text)) != 0:
            return None
        return text.value.decode("ascii", "replace")

    def max_clock_mhz(self) -> int | None:
        """Return the highest SM clock."""
        clock = ctypes.c_uint()
        if self._library is None or self._handle is None:
            return None
        done = self._library.nvmlDeviceGetMaxClockInfo(self._handle, _CLOCK_SM, ctypes.byref(clock)) == 0
        return clock.value if done else None

    def is_slowed(self) -> bool | None:
        """Say whether heat or a fault holds the clocks down at this moment."""
        if self._library is None or self._handle is None:
            return None
        reasons = ctypes.c_ulonglong()
        # The name before driver 535 still works on later ones.
        ask = self._library.nvmlDeviceGetCurrentClocksThrottleReasons
        return bool(reasons.value & _SLOWED) if ask(self._handle, ctypes.byref(reasons)) == 0 else None

    def ecc_events(self) -> int | None:
        """Return how many memory errors, corrected or not, were seen since the driver was loaded."""
        ask = getattr(self._library, "nvmlDeviceGetTotalEccErrors", None)
        if ask is None or self._handle is None:
            return None
        total = 0
        for kind in (_CORRECTED, _UNCORRECTED):
            count = ctypes.c_ulonglong()
            if ask(self._handle, kind, _SINCE_LOADED, ctypes.byref(count)) != 0:
                return None
            total += count.value
        return total


def _load() -> Any:
    try:
        library = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return None
    return library if library.nvmlInit_v2() == 0 else None
