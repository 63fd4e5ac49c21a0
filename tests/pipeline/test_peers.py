"""Peers of `tune-model bench`, on a CPU; what a GPU would capture is called here."""

from collections.abc import Callable

import pytest
import torch

from tune_model.pipeline.bench import peers as module
from tune_model.pipeline.bench.peers import Peer, peers, prepare

pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")  # torch.compile's own


def linear() -> Callable[[], torch.Tensor]:
    x, w = torch.randn(4, 16), torch.randn(8, 16)

    def call() -> torch.Tensor:
        with torch.no_grad():
            return torch.nn.functional.linear(x, w).relu()

    return call


def nobody(name: str, why: str) -> None:
    raise AssertionError(f"{name}: {why}")


@pytest.mark.parametrize("compile_too", [False, True])
def test_peers_of_a_cpu(compile_too: bool):
    wanted = peers(linear(), torch.device("cpu"), compile_too=compile_too)
    contenders = prepare(wanted, torch.device("cpu"), left_out=nobody)
    assert [c.name for c in contenders] == ["eager", *(["compile_freezing"] if compile_too else [])]


def test_peers_of_a_gpu_stay_compiled(monkeypatch: pytest.MonkeyPatch):
    """Preparing one must not reset what another has compiled: it would compile again within its time."""
    monkeypatch.setattr(module, "captured", lambda call: call)
    call = linear()
    wanted = peers(call, torch.device("cuda", 0), compile_too=True)
    contenders = prepare(wanted, torch.device("cpu"), left_out=nobody)
    assert [c.name for c in contenders] == ["eager", "eager_graph", "max_autotune", "max_autotune_called"]
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    assert graphs > 0
    for contender in contenders:
        torch.testing.assert_close(contender.run(), call())
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == graphs


def test_a_peer_that_fails_costs_itself_only():
    def broken() -> Callable[[], object]:
        raise NotImplementedError("no such pass\nand a long tale")

    def runs_out() -> object:
        raise torch.OutOfMemoryError("no memory")

    told = []
    wanted = [
        Peer("eager", linear),
        Peer("max_autotune", broken),
        Peer("max_autotune_called", lambda: runs_out),
        Peer("last", linear),
    ]
    contenders = prepare(wanted, torch.device("cpu"), left_out=lambda *what: told.append(what))
    assert [c.name for c in contenders] == ["eager", "last"]
    assert told == [
        ("max_autotune", "NotImplementedError: no such pass"),
        ("max_autotune_called", "OutOfMemoryError: no memory"),
    ]
