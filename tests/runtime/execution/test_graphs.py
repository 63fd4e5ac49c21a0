"""Which graph a call gets, what a graph keeps, and what a failed capture leaves, with stand-ins for torch's graphs."""

import gc
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_cuda import FakeCuda, FakeStream
from small_programs import (
    build_library,
    empty_replay,
    entry,
    language_model,
    language_weights,
    linear_relu,
    softmax_program,
    softmax_weights,
)
from torch import Tensor

from tune_model.runtime.execution import emission, executor
from tune_model.runtime.execution.executor import Executor, InputError
from tune_model.runtime.execution.graphs import GraphPool, GraphRunner
from tune_model.runtime.generation.decoder import Decoder, StepKind
from tune_model.runtime.generation.rows import Rows
from tune_model.runtime.generation.sampling import Sampling, needs_of
from tune_model.runtime.kernel import CpuLaunch, Kernel, Workspace
from tune_model.runtime.kv_cache import KVCache
from tune_model.runtime.launch.counters import prepare_counters
from tune_model.runtime.program import fingerprint
from tune_model.runtime.replay import Replay
from tune_model.runtime.weights.transforms import bind_weights

CPU = torch.device("cpu")
WEIGHTS = softmax_weights()

COUNTED = """
#include <cstdint>
extern "C" void counted(void *const *p, const int64_t *s) {
  float *out = (float *)p[0];
  int *counters = (int *)p[1];
  for (int i = 0; i < 3; ++i)
    if (counters[i] != 0) out[0] = 1e30f;
  for (int64_t i = 0; i < s[0]; ++i) out[i] = 1.0f;
}
"""


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    return FakeCuda(monkeypatch)


def runner(**options: Any) -> GraphRunner:
    program = softmax_program()
    run = Executor(program, bind_weights([program], WEIGHTS, "cpu"), {"one": torch.ones(1)}, empty_replay(), {}, "cpu")
    return GraphRunner(run, GraphPool(CPU), **options)


def decode_runner() -> tuple[GraphRunner, KVCache]:
    program = language_model("decode")
    run = Executor(program, bind_weights([program], language_weights(), "cpu"), {}, empty_replay(), {}, "cpu")
    return GraphRunner(run, GraphPool(CPU)), KVCache(program, 4, CPU)


def token(rows: int, **caches: Tensor) -> dict[str, Tensor]:
    return {
        "input_ids": torch.zeros(rows, 1, dtype=torch.int64),
        "positions": torch.zeros(rows, 1, dtype=torch.int64),
        **caches,
    }


def test_a_graph_keeps_its_counters_when_its_plan_is_forgotten(
    cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    """Replays do not touch the list of plans, so the plan of a busy graph is the first to go."""
    handed: list[weakref.ref[Tensor]] = []

    def observed(*args: Any) -> Any:
        step = prepare_counters(*args, streams=cuda.streams)

        def run(slots: list[Any]) -> None:
            step(slots)
            if cuda.capture is not None:
                handed.append(weakref.ref(slots[args[0]]))

        return run

    monkeypatch.setattr(emission, "prepare_counters", observed)
    monkeypatch.setattr(executor, "_PLANS_AT_MOST", 1)
    code, library = build_library(COUNTED, tmp_path)
    launch = CpuLaunch(code, "counted", ("t1", "ws0"), ("t1.size0*t1.size1",))
    kernel = Kernel((launch,), (Workspace("ws0", "int32", 3, counters=True),))
    replay = Replay({fingerprint(linear_relu()): (entry(kernel, (12,)), entry(kernel, (2,)))})
    program = softmax_program()
    run = Executor(
        program, bind_weights([program], WEIGHTS, "cpu"), {"one": torch.ones(1)}, replay, {code: library}, "cpu"
    )
    graph_runner = GraphRunner(run, GraphPool(CPU))
    x = torch.randn(3, 4, 8)
    assert float(graph_runner.run({"x": x})["out"].max()) == pytest.approx(0.25)
    run.run({"x": torch.randn(1, 2, 8)})
    assert len(run._plans) == 1
    gc.collect()
    assert [ref() is not None for ref in handed] == [True]
    graph_runner.run({"x": x})
    assert len(handed) == 1
    graph_runner._graphs.clear()
    gc.collect()
    assert [ref() is not None for ref in handed] == [False]


def test_what_the_work_raises_is_raised_and_streams_are_in_order(cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch):
    """The end of a capture that was lost hid why, and the caller's stream did not wait for what had run."""
    pool = GraphPool(CPU)
    lost = "operation failed due to a previous error during capture"

    def broken() -> None:
        if cuda.capture is not None:
            raise ValueError("not in a capture")

    for fails in (None, lost):
        memory = pool.memory
        monkeypatch.setattr("fake_cuda.FakeGraph.fails", fails)
        with pytest.raises(ValueError, match="not in a capture") as caught:
            pool.capture(broken)
        assert getattr(caught.value, "__notes__", []) == ([] if fails is None else [f"the capture ended with: {lost}"])
        assert cuda.capture is None
        assert (pool.memory is memory) == (fails is None)  # memory of a capture that never ends
        assert cuda.log[-1] == ("wait", cuda.current.cuda_stream, pool.stream.cuda_stream)
    monkeypatch.setattr("fake_cuda.FakeGraph.fails", None)
    pool.capture(lambda: None)


def test_a_pool_is_kept_when_its_graphs_are_gone(cuda: FakeCuda):
    """torch refused the next capture as long as a result of the last graph was alive."""
    pool = GraphPool(CPU)
    for _ in range(3):
        pool.capture(lambda: None)
        gc.collect()


def test_a_first_replay_on_another_stream_follows_the_capture(cuda: FakeCuda):
    pool = GraphPool(CPU)
    graph, _ = pool.capture(lambda: None)
    captured_on, other = cuda.current, FakeStream(cuda)
    with cuda.on(other):
        pool.wait(other)
        graph.replay()
    assert cuda.log[-2:] == [("wait", other.cuda_stream, captured_on.cuda_stream), ("replay", other.cuda_stream)]


def test_inputs_on_another_device_are_refused_after_a_capture_too(cuda: FakeCuda):
    """They were copied into the graph's inputs, while the first call had raised."""
    run = runner()
    run.run({"x": torch.zeros(1, 2, 8)})
    with pytest.raises(InputError, match="is on meta; expected cpu"):
        run.run({"x": torch.zeros(1, 2, 8, device="meta")})


def test_caches_at_a_known_address_but_laid_out_otherwise_get_no_graph(cuda: FakeCuda):
    """Only the first cache's shape counted: a replay took whatever began where a cache had been."""
    run, cache = decode_runner()
    good = token(2, **cache.slice(1, 3))
    run.run(good)
    assert cuda.log[-1][0] == "replay"
    v = good["v_cache.0"]
    others = {
        "has strides": v.as_strided(v.shape, (v.stride(0), v.stride(1), 1, v.shape[2])),
        "has shape": v[:1],
        "expected float32": v.view(torch.int32),
    }
    replays = cuda.log.count(cuda.log[-1])
    for message, other in others.items():
        assert other.data_ptr() == v.data_ptr()
        with pytest.raises(InputError, match=message):
            run.run({**good, "v_cache.0": other})
    assert [what for what, *_ in cuda.log].count("replay") == replays
    run.run(good)
    assert len(run._graphs) == 1


def test_sizes_that_come_often_are_not_forgotten_for_those_that_came_once(cuda: FakeCuda):
    """They were forgotten in the order they came first, and counted from nought again."""
    run = runner(eager_runs=2, at_most=1)  # remembers four sizes
    popular = {"x": torch.zeros(1, 1, 8)}
    run.run(popular)
    for length in range(2, 5):
        run.run({"x": torch.zeros(1, length, 8)})
    run.run(popular)
    run.run({"x": torch.zeros(1, 5, 8)})
    assert not run._graphs
    run.run(popular)
    assert len(run._graphs) == 1


def test_graphs_of_steps_have_an_end_and_those_in_use_stay(cuda: FakeCuda):
    """One was kept for every number of rows, context and kind of sampling that ever came."""
    program = language_model("decode")
    run = Executor(program, bind_weights([program], language_weights(), "cpu"), {}, empty_replay(), {}, "cpu")
    rows = Rows(KVCache(program, 4, CPU), 32, CPU)
    decoder = Decoder(run, rows, GraphPool(CPU), at_most=2)
    kinds = [StepKind(count, 8, needs_of([Sampling()])) for count in (1, 2, 4)]
    decoder.step(kinds[0])
    decoder.step(kinds[1])
    decoder.step(kinds[0])
    assert decoder.graphs == 2
    decoder.step(kinds[2])
    assert decoder.graphs == 2
    assert [decoder.is_ready(kind) for kind in kinds] == [True, False, True]
    assert ("synchronize",) in cuda.log
    decoder.capture(kinds[1])
    assert [decoder.is_ready(kind) for kind in kinds] == [False, True, True]
