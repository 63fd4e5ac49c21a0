"""Counters that a kernel finds at zero and leaves at zero, so that no call pays for setting them.

Calls that share counters must follow each other. The calls on one stream do, and so do the calls in one captured graph,
whose replays follow each other. So every stream and every graph has counters of its own, with one owner each:

- a prepared step owns those of the streams it runs on. They are allocated on their stream, so that their memory is used
  again only after the work that needs them;
- whoever captures a graph owns those of the graph: `GraphCounters`, kept and dropped with it. A plan may be forgotten
  while graphs of it are replayed;
- in a capture that somebody else makes nobody says when the graph is gone: `LentCounters` live as long as the model,
  which such a graph needs anyway, for its weights and its code.
"""

import ctypes
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Final, NamedTuple

import torch
from torch import Tensor

from tune_model.runtime.execution.invoke import PreparedStep, Slots
from tune_model.runtime.execution.layout import Layout
from tune_model.runtime.launch.cuda_driver import open_driver
from tune_model.runtime.launch.machine_code import device_index

__all__ = ["GraphCounters", "LentCounters", "Streams", "prepare_counters"]

_LENT_BYTES_AT_MOST: Final = 64 << 20
"""What captures of others may hold; at some kilobytes for each kernel and capture, hundreds of captures of a model."""

_ALLOCATED_BYTES: Final = 512
"""torch's allocator on CUDA rounds up to this."""


class GraphCounters:
    """The counters of one graph, for whoever captures it: to be kept and dropped together with it.

    For one stream of one device, in one thread.
    """

    def __init__(self) -> None:
        self._tensors: dict[object, Tensor] = {}

    @contextmanager
    def collect(self) -> Iterator[None]:
        """Give these counters to every kernel that this thread calls, on the way to the graph and in it.

        The work must run here once before it is captured, on the stream of the capture: a kernel's counters are set to
        zero at its first call, and what is set to zero in a capture is set by every replay.
        """
        before = _COLLECTING.set(self)
        try:
            yield
        finally:
            _COLLECTING.reset(before)

    def of(self, step: object, make: Callable[[], Tensor]) -> Tensor:
        """Return the counters of a prepared step, made at its first call.

        Args:
            step: Stands for it; kept, so that no other can be taken for it.
            make: Allocates zeros on the current stream.
        """
        tensor = self._tensors.get(step)
        if tensor is None:
            tensor = self._tensors[step] = make()
        return tensor


_COLLECTING: ContextVar[GraphCounters | None] = ContextVar("collecting", default=None)


class LentCounters:
    """The counters of graphs that others capture, kept for as long as this lives; safe to use from several threads.

    Args:
        bytes_at_most: What they may take. Past that a captured call's counters are memory of its graph, and each replay
            sets them to zero.
    """

    def __init__(self, bytes_at_most: int = _LENT_BYTES_AT_MOST) -> None:
        self._lock = threading.Lock()
        self._tensors: dict[tuple[int, int, object], Tensor] = {}
        self._left_bytes = bytes_at_most

    def of(
        self, capture: int, stream: int, step: object, layout: Layout, reserve: list[Tensor], make: Callable[[], Tensor]
    ) -> Tensor:
        """Return the counters of a prepared step in a capture.

        Args:
            capture: Its number, never used again in this process.
            stream: One of those that are captured; calls on two of them may overlap.
            step: Stands for the step; kept, so that no other can be taken for it.
            layout: Of the counters.
            reserve: Zeros of this layout that lie ready; one is taken where the graph has none yet.
            make: Allocates zeros in the capture.
        """
        key = (capture, stream, step)
        with self._lock:
            tensor = self._tensors.get(key)
            if tensor is not None:
                return tensor
            size_bytes = max(layout.shape[0] * layout.dtype.itemsize, _ALLOCATED_BYTES)
            if size_bytes > self._left_bytes:
                return make()
            self._left_bytes -= size_bytes
            tensor = self._tensors[key] = reserve.pop() if reserve else make()
            return tensor


class Streams(NamedTuple):
    """What must be known of a device's streams.

    Attributes:
        current: Returns the handle of this thread's current stream.
        capture: Returns the number of the capture that a stream is in, unique in the process; `None` outside captures.
        wait: Returns when the current stream has done its work.
    """

    current: Callable[[], int]
    capture: Callable[[int], int | None]
    wait: Callable[[], None]


def _cuda_streams(device: torch.device) -> Streams:
    index = device_index(device)
    driver = open_driver()

    def capture(stream: int) -> int | None:
        status, number = ctypes.c_int(), ctypes.c_uint64()
        code = driver.library.cuStreamGetCaptureInfo(
            ctypes.c_void_p(stream), ctypes.byref(status), ctypes.byref(number)
        )
        driver.check(code, "cuStreamGetCaptureInfo")
        return number.value if status.value else None

    def wait() -> None:
        torch.cuda.current_stream(index).synchronize()

    return Streams(lambda: driver.current_stream(index), capture, wait)


def prepare_counters(
    slot: int, layout: Layout, device: torch.device, lent: LentCounters, streams: Streams | None = None
) -> PreparedStep:
    """Prepare giving a kernel its counters; the step may be called from several threads.

    Every call of the kernel must leave its counters at zero. What a call that failed half-way leaves is not repaired.

    Args:
        slot: Where they go.
        layout: Of their memory: a vector of integers, one for each group of programs that count together.
        device: Where the kernel runs. On a CPU, where nothing needs them, every call gets new ones.
        lent: Keeps those of captures that others make.
        streams: Of the device; by default those of CUDA.
    """

    def zeros() -> Tensor:
        return torch.zeros(layout.shape, dtype=layout.dtype, device=device)

    if streams is None and device.type != "cuda":

        def run_anew(slots: Slots) -> None:
            slots[slot] = zeros()

        return run_anew

    current, capture_of, wait = streams or _cuda_streams(device)
    step = object()
    owned: dict[int, Tensor] = {}
    reserve: list[Tensor] = []

    def set_aside() -> None:
        """Keep zeros ready for a capture of somebody else, where making them would be a part of the graph."""
        reserve.append(zeros())
        wait()  # the graph may run on any stream

    def run(slots: Slots) -> None:
        graph = _COLLECTING.get()
        if graph is not None:
            slots[slot] = graph.of(step, zeros)
            return
        stream = current()
        capture = capture_of(stream)
        if capture is not None:
            slots[slot] = lent.of(capture, stream, step, layout, reserve, zeros)
            return
        tensor = owned.get(stream)
        if tensor is None:
            tensor = owned[stream] = zeros()
        if not reserve:
            set_aside()
        slots[slot] = tensor

    if _COLLECTING.get() is None and capture_of(current()) is None:
        set_aside()
    return run
