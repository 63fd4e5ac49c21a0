"""Replay whole programs as CUDA graphs: one per set of sizes and caches, captured on first use.

A graph reads and writes fixed addresses. Small inputs are copied into buffers of the graph's own; caches are too large
for that and are used where they lie, so a graph belongs to the caches it was captured with. All graphs of a pool share
memory and so must not run at the same time: a lock and an event keep them in order, also across streams and threads.
What a graph needs besides (weights, code) belongs to the model; plans may be dropped while graphs of them are replayed.
"""

import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from tune_model.runtime.execution.executor import Executor
from tune_model.runtime.execution.graph_memory import GraphMemory
from tune_model.runtime.launch.counters import GraphCounters

__all__ = ["CapturedGraph", "GraphPool", "GraphRunner"]

_T = TypeVar("_T")

_GRAPHS_AT_MOST = 64
_WARM_UP_RUNS = 2


class CapturedGraph(NamedTuple):
    """A CUDA graph and what its kernels find again at the next replay; to be dropped when no replay is under way.

    Attributes:
        graph: Of CUDA.
        counters: Its own.
    """

    graph: torch.cuda.CUDAGraph
    counters: GraphCounters

    def replay(self) -> None:
        """Launch it on the current stream."""
        self.graph.replay()


class GraphPool:
    """Memory that the graphs of one device share, and the order they run in.

    Whoever captures or replays holds `lock` meanwhile; a replay lies between `wait` and `done` on its stream.

    Args:
        device: CUDA.

    Attributes:
        lock: Held by one thread at a time.
        stream: Where graphs are captured; nothing else runs there.
        memory: Where graphs keep what they compute; another one after a capture that could not end.
    """

    def __init__(self, device: torch.device) -> None:
        self.lock = threading.RLock()
        self.stream = torch.cuda.Stream(device)
        self.memory = GraphMemory()
        self._last: tuple[torch.cuda.Event, int] | None = None

    def wait(self, stream: torch.cuda.Stream) -> None:
        """Let `stream` wait for the last graph, if that ran on another."""
        if self._last is not None and self._last[1] != stream.cuda_stream:
            stream.wait_event(self._last[0])

    def done(self, stream: torch.cuda.Stream) -> None:
        """Note that the last graph's results have been read on `stream` once it gets here."""
        event = self._last[0] if self._last is not None else torch.cuda.Event()
        event.record(stream)
        self._last = (event, stream.cuda_stream)

    def capture(self, work: Callable[[], _T], warm_up: Callable[[], object] | None = None) -> tuple[CapturedGraph, _T]:
        """Capture what a function launches; the caller holds the lock.

        Args:
            work: Called once, while nothing runs. It launches on the current stream alone and never waits for the
                device; every tensor that it reads lies where it is at each replay. What it returns lies in the graph's
                memory: valid after a replay, until the pool's next.
            warm_up: Called twice before, for real, so that libraries initialise, plans are built and counters set to
                zero; by default `work`. It runs the same programs at the same sizes, and may be repeated.

        Returns:
            The graph, and what `work` returned.

        Raises:
            Exception: What `work` or `warm_up` raised; nothing is captured then, and the next capture may follow.
        """
        current = torch.cuda.current_stream(self.stream.device)
        self.wait(current)
        self.stream.wait_stream(current)
        graph = CapturedGraph(torch.cuda.CUDAGraph(), GraphCounters())
        try:
            with torch.cuda.stream(self.stream), graph.counters.collect():
                for _ in range(_WARM_UP_RUNS):
                    (warm_up or work)()
                made = self._record(graph.graph, work)
        finally:
            current.wait_stream(self.stream)
            self.done(current)  # the first replay may be on another stream
        return graph, made

    def _record(self, graph: torch.cuda.CUDAGraph, work: Callable[[], _T]) -> _T:
        self.memory.begin(graph)
        try:
            made = work()
        except BaseException as error:
            try:
                self._end(graph)  # or the stream would go on capturing
            except RuntimeError as second:  # what went wrong has ended it already
                error.add_note(f"the capture ended with: {second}")
            raise
        self._end(graph)
        return made

    def _end(self, graph: torch.cuda.CUDAGraph) -> None:
        try:
            graph.capture_end()
        except RuntimeError:
            # torch's allocator goes on taking this memory for that of a capture, and would refuse the next one.
            self.memory = GraphMemory()
            raise


class _Captured(NamedTuple):
    graph: CapturedGraph
    inputs: dict[str, Tensor]
    outputs: dict[str, Tensor]


class GraphRunner:
    """Runs a program through CUDA graphs; safe to use from several threads.

    Running a program twice on the same inputs must leave its caches as running it once does: before a graph is
    captured, the program runs to warm up.

    Args:
        executor: Of the program, on a CUDA device.
        pool: Shared with other runners of the device.
        eager_runs: How often a new set of sizes runs without a graph before one is captured.
        at_most: Graphs that are kept; the one that was not used for longest goes first.
    """

    def __init__(
        self, executor: Executor, pool: GraphPool, *, eager_runs: int = 0, at_most: int = _GRAPHS_AT_MOST
    ) -> None:
        self.executor = executor
        self._pool = pool
        self._eager_runs = eager_runs
        self._at_most = at_most
        self._epoch = executor.epoch
        self._graphs: OrderedDict[tuple[object, ...], _Captured] = OrderedDict()
        self._seen: OrderedDict[tuple[object, ...], int] = OrderedDict()
        self._user = tuple(item.name for item in executor.program.inputs if item.role == "user")
        self._caches = tuple(item.name for item in executor.program.inputs if item.role == "cache")

    def run(
        self, inputs: Mapping[str, Tensor], hints: Mapping[str, int] | None = None, *, clone: bool = True
    ) -> dict[str, Tensor]:
        """Run the program once.

        Args:
            inputs: By name.
            hints: As for `Executor.run`.
            clone: Return copies. Otherwise the outputs are the graph's own memory, valid until the pool's next run.

        Returns:
            Outputs by name.

        Raises:
            InputError: The inputs do not fit.
        """
        if torch.cuda.is_current_stream_capturing():
            return self.executor.run(inputs, hints)
        with self._pool.lock, torch.cuda.device(self.executor.device):
            if self._epoch != self.executor.epoch:
                torch.cuda.synchronize(self.executor.device)
                self._graphs.clear()
                self._epoch = self.executor.epoch
            key = self._key(inputs, hints or {})
            if key is None:
                return self.executor.run(inputs, hints)
            captured = self._graphs.get(key)
            if captured is None:
                if self._runs_eagerly(key):
                    return self.executor.run(inputs, hints)
                captured = self._graphs[key] = self._capture(inputs, hints)
                if len(self._graphs) > self._at_most:
                    torch.cuda.synchronize(self.executor.device)
                    self._graphs.popitem(last=False)
            else:
                self._graphs.move_to_end(key)
            return self._replay(captured, inputs, clone=clone)

    def _key(self, inputs: Mapping[str, Tensor], hints: Mapping[str, int]) -> tuple[object, ...] | None:
        """Name what a graph depends on, in the order of the program's inputs.

        Inputs of the user's are copied into the graph's own, whatever their strides: shape and dtype. Caches are used
        where they lie: address, shape, strides and dtype of each. Then the hints.

        Returns:
            `None` when the inputs do not fit, which the executor says better: a replay checks nothing.
        """
        device = self.executor.device
        try:
            if len(inputs) != len(self._user) + len(self._caches):
                return None
            if any(tensor.device != device for tensor in inputs.values()):
                return None
            user = [(inputs[name].shape, inputs[name].dtype) for name in self._user]
            caches = [(t.data_ptr(), t.shape, t.stride(), t.dtype) for t in (inputs[name] for name in self._caches)]
        except (KeyError, AttributeError):
            return None
        return (*user, *caches, *sorted(hints.items()))

    def _runs_eagerly(self, key: tuple[object, ...]) -> bool:
        count = self._seen.get(key, 0)
        self._seen[key] = count + 1
        self._seen.move_to_end(key)
        if len(self._seen) > 4 * self._at_most:
            self._seen.popitem(last=False)
        return count < self._eager_runs

    def _capture(self, inputs: Mapping[str, Tensor], hints: Mapping[str, int] | None) -> _Captured:
        static = {name: tensor.clone() if name in self._user else tensor for name, tensor in inputs.items()}
        graph, outputs = self._pool.capture(lambda: self.executor.run(static, hints))
        # Caches are not kept: whoever replays the graph passes caches that lie at the same addresses.
        return _Captured(graph, {name: static[name] for name in self._user}, outputs)

    def _replay(self, captured: _Captured, inputs: Mapping[str, Tensor], *, clone: bool) -> dict[str, Tensor]:
        stream = torch.cuda.current_stream(self.executor.device)
        self._pool.wait(stream)
        for name in self._user:
            static, given = captured.inputs[name], inputs[name]
            if static.data_ptr() != given.data_ptr():
                static.copy_(given)
        captured.graph.replay()
        outputs = captured.outputs
        if clone:
            outputs = {name: tensor.clone() for name, tensor in outputs.items()}
        self._pool.done(stream)
        return outputs
