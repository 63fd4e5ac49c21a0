"""Who owns a kernel's counters: streams, graphs of this package, graphs of others."""

import gc
import weakref
from typing import Any

import pytest
import torch
from fake_cuda import FakeCuda, FakeStream
from torch import Tensor

from tune_model.runtime.execution.graphs import GraphPool
from tune_model.runtime.execution.invoke import PreparedStep
from tune_model.runtime.execution.layout import Layout
from tune_model.runtime.launch import counters
from tune_model.runtime.launch.counters import GraphCounters, LentCounters, prepare_counters
from tune_model.runtime.launch.cuda_driver import Driver, DriverError

CPU = torch.device("cpu")
LAYOUT = Layout(torch.int32, (4,), (1,))


class Kernel:
    """A step that asks for its counters, finds them at zero and leaves them so."""

    def __init__(self, cuda: FakeCuda, lent: LentCounters | None = None) -> None:
        self.cuda = cuda
        self.step: PreparedStep = prepare_counters(0, LAYOUT, CPU, lent or LentCounters(), cuda.streams)

    def __call__(self) -> Tensor:
        slots: list[Tensor | None] = [None]
        self.step(slots)
        (found,) = slots
        assert found is not None
        assert found.tolist() == [0, 0, 0, 0]
        return found


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    return FakeCuda(monkeypatch)


@pytest.fixture
def zeroed_in_captures(monkeypatch: pytest.MonkeyPatch, cuda: FakeCuda) -> list[int | None]:
    """The captures in which memory is set to zero: each such replay pays for it again."""
    seen: list[int | None] = []
    zeros = torch.zeros

    def counted(*args: object, **kwargs: object) -> Tensor:
        if cuda.capture is not None:
            seen.append(cuda.capture)
        return zeros(*args, **kwargs)

    monkeypatch.setattr(torch, "zeros", counted)
    return seen


def test_calls_on_a_stream_share_counters_and_streams_do_not(cuda: FakeCuda):
    kernel = Kernel(cuda)
    first = kernel()
    assert kernel() is first
    with cuda.on(FakeStream(cuda)):
        assert kernel() is not first
    assert kernel() is first
    assert Kernel(cuda)() is not first


def test_graphs_own_their_counters_when_the_plan_is_gone(cuda: FakeCuda, zeroed_in_captures: list[int | None]):
    """They lay in the plan's step: when 128 other plans had come, graphs counted in memory of somebody else."""
    pool = GraphPool(CPU)
    kernel = Kernel(cuda)
    made = [pool.capture(kernel) for _ in range(3)]
    graphs = [graph for graph, _ in made]
    owned = [weakref.ref(tensor) for _, tensor in made]
    assert len({id(ref()) for ref in owned}) == 3
    assert all(ref() is not kernel() for ref in owned)
    del made, kernel
    gc.collect()
    assert all(ref() is not None for ref in owned)
    assert zeroed_in_captures == []  # the second capture of a plan, too
    del graphs[1]
    gc.collect()
    assert [ref() is None for ref in owned] == [False, True, False]


def test_a_plan_that_is_made_again_between_warm_up_and_capture_is_another(cuda: FakeCuda):
    """Another thread may push a plan out at any moment. An address that is used again names no old counters."""
    seen = []
    with GraphCounters().collect():
        for _ in range(50):
            kernel = Kernel(cuda)
            seen.append(kernel())
            assert kernel() is seen[-1]
    assert len({id(tensor) for tensor in seen}) == 50


def test_captures_of_others_have_counters_of_their_own(cuda: FakeCuda, zeroed_in_captures: list[int | None]):
    """The second capture of a plan set its counters to zero in the graph, at every replay."""
    lent = LentCounters()
    kernel = Kernel(cuda, lent)
    eager = kernel()
    captured = []
    for _ in range(3):
        with cuda.capturing():
            captured.append(kernel())
            assert kernel() is captured[-1]
            with cuda.on(FakeStream(cuda)):  # a branch of the same graph
                assert kernel() is not captured[-1]
        assert kernel() is eager
    assert len({id(tensor) for tensor in (*captured, eager)}) == 4
    # A branch finds nothing laid aside in a capture that has taken it; whole captures do.
    assert len(zeroed_in_captures) == 3
    kept = [weakref.ref(tensor) for tensor in captured]
    del captured, kernel
    gc.collect()
    assert all(ref() is not None for ref in kept)
    del lent
    gc.collect()
    assert all(ref() is None for ref in kept)


def test_a_first_call_may_be_in_a_capture_of_others(cuda: FakeCuda, zeroed_in_captures: list[int | None]):
    kernel = Kernel(cuda)
    with cuda.capturing():
        kernel()
        assert zeroed_in_captures == []
        late = Kernel(cuda)
        assert late() is late()
    assert len(zeroed_in_captures) == 1


def test_what_others_hold_has_an_end(cuda: FakeCuda):
    """One tensor leaked for each capture. Past the limit counters are memory of the graph, set to zero at each call."""
    kernel = Kernel(cuda, LentCounters(bytes_at_most=2 * 512))
    kept = []
    for number in range(4):
        kernel()
        with cuda.capturing():
            first = kernel()
            assert (kernel() is first) == (number < 2)
        kept.append(weakref.ref(first))
        del first
    gc.collect()
    assert [ref() is not None for ref in kept] == [True, True, False, False]


class FakeLibrary:
    """Of libcuda, the one function that tells captures."""

    def __init__(self, cuda: FakeCuda) -> None:
        self.cuda = cuda
        self.code = 0

    def cuStreamGetCaptureInfo(self, stream: Any, status: Any, number: Any) -> int:  # noqa: N802 (libcuda's name)
        assert stream.value == self.cuda.current.cuda_stream
        if self.cuda.capture is not None:
            status._obj.value, number._obj.value = 1, self.cuda.capture
        return self.code

    def cuGetErrorName(self, code: int, name: Any) -> int:  # noqa: N802
        return 1


def test_the_driver_is_asked_which_capture_a_stream_is_in(cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch):
    library = FakeLibrary(cuda)
    driver = Driver(library, lambda index: cuda.current.cuda_stream if index == 0 else -1)
    monkeypatch.setattr(counters, "open_driver", lambda: driver)
    streams = counters._cuda_streams(torch.device("cuda", 0))
    assert streams.capture(streams.current()) is None
    with cuda.capturing():
        assert streams.capture(streams.current()) == cuda.capture
    streams.wait()
    assert cuda.log == [("synchronize", cuda.current.cuda_stream)]
    library.code = 900
    with pytest.raises(DriverError, match="cuStreamGetCaptureInfo: CUDA error 900"):
        streams.capture(streams.current())


def test_on_a_cpu_every_call_gets_zeros():
    step = prepare_counters(0, LAYOUT, CPU, LentCounters())
    slots: list[Tensor | None] = [None]
    step(slots)
    first = slots[0]
    assert first is not None
    assert first.dtype == torch.int32
    assert first.tolist() == [0, 0, 0, 0]
    step(slots)
    assert slots[0] is not first
