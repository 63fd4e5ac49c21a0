"""The management library as a fake: what is asked of it, and what its silence means."""

import ctypes
from typing import Any

import pytest

from tune_model.tune.measuring import nvml as module
from tune_model.tune.measuring.nvml import Nvml


class Library:
    """Answers as the real one does: through pointers, with 0 for success."""

    def __init__(self, **fails: bool) -> None:
        self.fails = fails
        self.errors = {0: 2, 1: 1}
        self.reasons = 0

    def nvmlDeviceGetHandleByUUID(self, uuid: bytes, handle: Any) -> int:  # noqa: N802 (NVML's name)
        return 0 if uuid == b"GPU-7" else 6

    def nvmlDeviceGetTotalEccErrors(self, handle: Any, kind: int, counter: int, count: Any) -> int:  # noqa: N802
        count._obj.value = self.errors[kind]
        return 3 if self.fails.get("ecc") else 0

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, handle: Any, reasons: Any) -> int:  # noqa: N802
        ctypes.cast(reasons, ctypes.c_void_p)
        reasons._obj.value = self.reasons
        return 0


def opened(monkeypatch: pytest.MonkeyPatch, library: Library | None, uuid: str = "7") -> Nvml:
    monkeypatch.setattr(module, "_load", lambda: library)
    return Nvml(uuid)


def test_corrected_and_uncorrected_errors_count(monkeypatch: pytest.MonkeyPatch):
    library = Library()
    nvml = opened(monkeypatch, library)
    assert nvml.ecc_events() == 3
    library.errors[0] += 1
    assert nvml.ecc_events() == 4


@pytest.mark.parametrize(("library", "uuid"), [(None, "7"), (Library(ecc=True), "7"), (Library(), "8")])
def test_what_is_not_answered_is_unknown(monkeypatch: pytest.MonkeyPatch, library: Library | None, uuid: str):
    assert opened(monkeypatch, library, uuid).ecc_events() is None


@pytest.mark.parametrize(("reasons", "slowed"), [(0, False), (0x4, False), (0x40, True), (0x24, True)])
def test_heat_slows_and_a_power_cap_does_not(monkeypatch: pytest.MonkeyPatch, reasons: int, slowed: bool):
    library = Library()
    library.reasons = reasons
    assert opened(monkeypatch, library).is_slowed() is slowed
