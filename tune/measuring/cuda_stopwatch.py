"""Timing on an NVIDIA GPU: many calls captured in one CUDA graph, its replays timed with events.

Within a graph calls follow each other as in a deployed step, without launch gaps. Weights rotate over the copies they
are given, so that each call finds them as cold as the program would; activations stay warm. All graphs of a task share
one memory pool: none of them keeps results.
"""

import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from random import Random
from typing import Final

import torch

from tune_model.runtime.execution.graph_memory import GraphMemory
from tune_model.runtime.launch.counters import GraphCounters
from tune_model.tune.device import Samples
from tune_model.tune.measuring.interval import drifted
from tune_model.tune.measuring.nvml import Nvml
from tune_model.tune.measuring.policy import Rung

__all__ = ["CudaCalls", "CudaStopwatch"]

CALLS_AT_MOST: Final = 400
"""Longer graphs take more time to capture than their precision is worth."""

_IDLE_S: Final = 1.0
"""After this long without work the clocks have dropped: warm up again."""

_WARM_UP_S: Final = 0.3


class CudaCalls:
    """A candidate captured as a graph of `calls` calls, with the counters that they share."""

    def __init__(self, graph: torch.cuda.CUDAGraph, calls: int, counters: GraphCounters) -> None:
        self.graph = graph
        self.calls = calls
        self.counters = counters


class CudaStopwatch:
    """Times candidates on one GPU, on a stream of its own.

    Attributes:
        spoiled: A capture failed; this process should measure no more.
    """

    def __init__(self, device: torch.device, sample_us: float) -> None:
        """Prepare.

        Args:
            device: Which GPU.
            sample_us: How long one replay of a graph should take.
        """
        self.device = device
        self.sample_us = sample_us
        self.stream = torch.cuda.Stream(device)
        self.memory = GraphMemory()
        self.last_used = 0.0
        self.spoiled = False
        self.nvml = Nvml(str(torch.cuda.get_device_properties(device).uuid))

    def prepare(self, run: Callable[[int], None], copies: int) -> CudaCalls:
        """Capture a candidate that has run at least once.

        Raises:
            RuntimeError: It does something that a graph cannot hold.
        """
        self.warm_up()
        counters = GraphCounters()
        with self.context(), counters.collect():
            calls = self._first_length(run, copies)
            graph, spent_us = self._capture(run, copies, calls)
            if spent_us < 0.5 * self.sample_us and calls < CALLS_AT_MOST:
                # Launches from Python were slower than the kernel itself, so the first guess was too short.
                calls = _whole_turns(calls * self.sample_us / max(spent_us, 1.0), copies)
                graph, _ = self._capture(run, copies, calls)
        self.last_used = time.monotonic()
        return CudaCalls(graph, calls, counters)

    def time(self, calls: CudaCalls, rung: Rung) -> Samples:
        """Time replays of one candidate, back to back."""
        self.warm_up()
        with self.context():
            calls.graph.replay()
            marks = [self._mark()]
            for _ in range(rung.samples):
                calls.graph.replay()
                marks.append(self._mark())
            self.stream.synchronize()
        self.last_used = time.monotonic()
        spans = itertools.pairwise(marks)
        return Samples(tuple(a.elapsed_time(b) * 1000.0 / calls.calls for a, b in spans))

    def compare(self, contenders: Sequence[CudaCalls], rung: Rung, seed: int) -> list[Samples]:
        """Time replays in interleaved rounds, in random order within each."""
        self.warm_up()
        order = list(range(len(contenders)))
        shuffle = Random(seed).shuffle  # noqa: S311 (an order of measurements)
        marks: list[tuple[int, torch.cuda.Event, torch.cuda.Event]] = []
        errors = self.nvml.ecc_events()
        with self.context():
            for calls in contenders:
                calls.graph.replay()
            for _ in range(rung.samples):
                shuffle(order)
                for index in order:
                    start = self._mark()
                    contenders[index].graph.replay()
                    marks.append((index, start, self._mark()))
            slowed = self.nvml.is_slowed() is True  # while the GPU is still at it
            self.stream.synchronize()
        self.last_used = time.monotonic()
        times: list[list[float]] = [[] for _ in contenders]
        for index, start, end in marks:
            times[index].append(start.elapsed_time(end) * 1000.0 / contenders[index].calls)
        # Memory that corrects an error, or retires a page, stalls whoever uses it.
        disturbed = drifted(times[0]) or slowed or self.nvml.ecc_events() != errors
        return [Samples(tuple(us), disturbed) for us in times]

    def context(self) -> AbstractContextManager[None]:
        """Return the context in which everything of this device must run: its GPU and its stream."""
        return _on(self.device, self.stream)

    def reset(self) -> None:
        """Forget the graphs' memory: a new task begins."""
        self.memory = GraphMemory()

    def warm_up(self) -> None:
        """Bring the clocks up if the GPU was idle."""
        if time.monotonic() - self.last_used < _IDLE_S:
            return
        with self.context():
            a = torch.randn(2048, 2048, device=self.device, dtype=torch.float16)
            end = time.monotonic() + _WARM_UP_S
            while time.monotonic() < end:
                for _ in range(20):
                    torch.mm(a, a)
                self.stream.synchronize()
        self.last_used = time.monotonic()

    def synchronize(self) -> None:
        """Wait for the device and raise what its kernels did wrong."""
        torch.cuda.synchronize(self.device)

    def _first_length(self, run: Callable[[int], None], copies: int) -> int:
        """Guess how many calls a graph should hold: enough for a sample, and every copy of the weights once."""
        run(0)
        start = self._mark()
        for number in range(3):
            run(number % copies)
        end = self._mark()
        self.stream.synchronize()
        estimate_us = max(float(start.elapsed_time(end)) * 1000.0 / 3, 1.0)
        return _whole_turns(self.sample_us / estimate_us, copies)

    def _capture(self, run: Callable[[int], None], copies: int, calls: int) -> tuple[torch.cuda.CUDAGraph, float]:
        """Capture `calls` calls and replay them once; returns what that took as well."""
        graph = torch.cuda.CUDAGraph()
        self.stream.synchronize()
        self.memory.begin(graph)
        try:
            for number in range(calls):
                run(number % copies)
            graph.capture_end()
        except BaseException:
            # A capture that is cut off leaves torch's allocator in the middle of it.
            self.spoiled = True
            raise
        graph.replay()  # uploads it
        start = self._mark()
        graph.replay()
        end = self._mark()
        self.stream.synchronize()
        return graph, start.elapsed_time(end) * 1000.0

    def _mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record(self.stream)
        return event


def _whole_turns(calls: float, copies: int) -> int:
    """Round to whole turns through the copies: a turn that is cut short would meet its start again while it is warm."""
    turns = min(calls, CALLS_AT_MOST) / copies
    return copies * max(1, round(turns), -(-2 // copies))


@contextmanager
def _on(device: torch.device, stream: torch.cuda.Stream) -> Iterator[None]:
    with torch.cuda.device(device), torch.cuda.stream(stream):
        yield
