"""Candidates captured one after another in the memory of one task, with stand-ins for torch's graphs."""

import gc
from types import SimpleNamespace

import pytest
import torch
from fake_cuda import FakeCuda

from tune_model.tune.measuring import cuda_stopwatch
from tune_model.tune.measuring.cuda_stopwatch import CudaStopwatch


@pytest.fixture
def stopwatch(monkeypatch: pytest.MonkeyPatch) -> CudaStopwatch:
    FakeCuda(monkeypatch)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _device: SimpleNamespace(uuid="GPU-1"))
    monkeypatch.setattr(cuda_stopwatch, "Nvml", lambda _uuid: None)
    made = CudaStopwatch(torch.device("cpu"), 100.0)
    monkeypatch.setattr(made, "warm_up", lambda: None)  # a CPU would be at it for minutes
    return made


def test_the_next_candidate_is_captured_when_the_last_ones_graph_is_gone(stopwatch: CudaStopwatch):
    """torch refused as long as a result of the last graph was alive, and the candidate was out for it."""
    for _ in range(2):
        for _ in range(3):
            stopwatch.prepare(lambda _number: None, copies=1)
            gc.collect()
        stopwatch.reset()
