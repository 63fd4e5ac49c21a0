"""Counters that a kernel finds at zero and leaves at zero, so that no call pays for setting them.

Calls on one stream follow each other and share memory; so do the calls in one captured graph, whose replays follow each
other. Every stream and every capture has its own.
"""

import ctypes

import torch
from torch import Tensor

from tune_model.runtime.execution.invoke import PreparedStep, Slots
from tune_model.runtime.execution.layout import Layout
from tune_model.runtime.launch.cuda_driver import open_driver
from tune_model.runtime.launch.machine_code import device_index

__all__ = ["prepare_counters"]


def prepare_counters(slot: int, layout: Layout, device: torch.device) -> PreparedStep:
    """Prepare giving a kernel its counters.

    Args:
        slot: Where they go.
        layout: Of their memory.
        device: Where the kernel runs.
    """

    def zeros() -> Tensor:
        return torch.zeros(layout.shape, dtype=layout.dtype, device=device)

    if device.type != "cuda":

        def run_anew(slots: Slots) -> None:
            slots[slot] = zeros()

        return run_anew

    index = device_index(device)
    driver = open_driver()
    owned: dict[tuple[str, int], Tensor] = {}
    reserve: list[Tensor] = []

    def set_aside() -> None:
        """Keep some memory ready for a capture: what is zeroed inside one is zeroed again by every replay."""
        reserve.append(zeros())
        torch.cuda.current_stream(index).synchronize()

    def owner(stream: int) -> tuple[str, int]:
        status, capture = ctypes.c_int(), ctypes.c_uint64()
        code = driver.library.cuStreamGetCaptureInfo(
            ctypes.c_void_p(stream), ctypes.byref(status), ctypes.byref(capture)
        )
        driver.check(code, "cuStreamGetCaptureInfo")
        return ("capture", capture.value) if status.value else ("stream", stream)

    def run(slots: Slots) -> None:
        key = owner(driver.current_stream(index))
        tensor = owned.get(key)
        if tensor is None:
            try:
                tensor = reserve.pop()
            except IndexError:
                tensor = zeros()
            owned[key] = tensor
            if key[0] == "stream":
                set_aside()
        slots[slot] = tensor

    if not torch.cuda.is_current_stream_capturing():
        set_aside()
    return run
