"""A stand-in for torch's streams, events and graphs, so that capturing and replaying is tested without a GPU.

Work runs at once, on the CPU. A graph records nothing: what a replay would touch is for the test to look at.
"""

import itertools
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch

from tune_model.runtime.launch.counters import Streams


class FakeStream:
    def __init__(self, cuda: "FakeCuda", device: Any = None) -> None:
        self.cuda, self.device, self.cuda_stream = cuda, device, next(cuda.numbers)

    def wait_stream(self, other: "FakeStream") -> None:
        self.cuda.log.append(("wait", self.cuda_stream, other.cuda_stream))

    def wait_event(self, event: "FakeEvent") -> None:
        self.cuda.log.append(("wait", self.cuda_stream, event.stream))

    def synchronize(self) -> None:
        self.cuda.log.append(("synchronize", self.cuda_stream))


class FakeEvent:
    stream: int | None = None

    def __init__(self, *, enable_timing: bool = False) -> None:
        self.enable_timing = enable_timing

    def elapsed_time(self, _other: "FakeEvent") -> float:
        return 1.0

    def record(self, stream: FakeStream) -> None:
        self.stream = stream.cuda_stream


class FakeGraph:
    """Attributes: fails: `capture_end` raises this, as after a call that a capture cannot hold."""

    fails: str | None = None

    def __init__(self, cuda: "FakeCuda") -> None:
        self.cuda = cuda

    def capture_begin(self, pool: object = None, capture_error_mode: str = "global") -> None:
        assert self.cuda.capture is None, "a stream that captures already"
        users = self.cuda.pools.setdefault(pool, weakref.WeakSet())
        if len(users) == 0 and pool in self.cuda.used:
            raise RuntimeError("use_count > 0 INTERNAL ASSERT FAILED")  # a result of the last graph lies there still
        users.add(self)
        self.cuda.used.add(pool)
        self.cuda.capture = next(self.cuda.numbers)

    def capture_end(self) -> None:
        assert self.cuda.capture is not None
        self.cuda.capture = None
        if self.fails:
            raise RuntimeError(self.fails)

    def replay(self) -> None:
        self.cuda.log.append(("replay", self.cuda.current.cuda_stream))


class FakeCuda:
    """One device.

    Attributes:
        current: This thread's stream.
        capture: Number of the capture that it is in.
        log: What was waited for and replayed, in order.
        pools: Graphs that were begun in each, and are alive.
        used: Pools that a graph was ever begun in.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.numbers = itertools.count(1)
        self.current = FakeStream(self)
        self.capture: int | None = None
        self.log: list[tuple[Any, ...]] = []
        self.pools: dict[object, weakref.WeakSet[FakeGraph]] = {}
        self.used: set[object] = set()
        stand_ins = {
            "Stream": lambda device=None: FakeStream(self, device),
            "Event": FakeEvent,
            "CUDAGraph": lambda: FakeGraph(self),
            "graph_pool_handle": lambda: (0, next(self.numbers)),
            "current_stream": lambda device=None: self.current,
            "stream": self.on,
            "device": lambda device: nullcontext(),
            "is_current_stream_capturing": lambda: self.capture is not None,
            "synchronize": lambda device=None: self.log.append(("synchronize",)),
        }
        for name, stand_in in stand_ins.items():
            monkeypatch.setattr(torch.cuda, name, stand_in)

    @contextmanager
    def on(self, stream: FakeStream) -> Iterator[None]:
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before

    @contextmanager
    def capturing(self) -> Iterator[None]:
        """As somebody else captures, on the current stream."""
        self.capture = next(self.numbers)
        try:
            yield
        finally:
            self.capture = None

    @property
    def streams(self) -> Streams:
        """What counters ask of them."""

        def wait() -> None:
            self.current.synchronize()

        return Streams(lambda: self.current.cuda_stream, lambda _stream: self.capture, wait)
