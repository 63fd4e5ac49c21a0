"""Programs, graphs and generation on a real GPU."""

import threading

import msgspec
import pytest
import torch
from small_programs import (
    empty_replay,
    language_greedy,
    language_model,
    language_weights,
    softmax_program,
    softmax_reference,
    softmax_weights,
)

from tune_model.runtime.execution.executor import Executor, InputError
from tune_model.runtime.execution.graphs import GraphPool, GraphRunner
from tune_model.runtime.kv_cache import KVCache
from tune_model.runtime.tuned import ModelParts, TunedModel
from tune_model.runtime.weights.transforms import bind_weights

pytestmark = pytest.mark.gpu

WEIGHTS = softmax_weights()
LANGUAGE = language_weights()
PROMPTS = [[3, 1, 4, 1, 5], [9], [2, 6, 5, 3, 5, 8, 9, 7, 9]]
NEW = 8


def executor() -> Executor:
    program = softmax_program()
    weights = bind_weights([program], WEIGHTS, "cuda")
    return Executor(program, weights, {"one": torch.ones(1)}, empty_replay(), {}, "cuda")


def runner(eager_runs: int = 0) -> GraphRunner:
    run = executor()
    return GraphRunner(run, GraphPool(run.device), eager_runs=eager_runs)


def check(out: torch.Tensor, x: torch.Tensor) -> None:
    torch.testing.assert_close(out.double().cpu(), softmax_reference(x.cpu(), WEIGHTS), atol=1e-5, rtol=1e-5)


def test_a_program_runs_on_the_gpu():
    run = executor()
    for batch, length in ((1, 1), (3, 4), (2, 0)):
        x = torch.randn(batch, length, 8, device="cuda")
        for _ in range(2):
            check(run.run({"x": x})["out"], x)
    with pytest.raises(InputError, match="is on cpu; expected cuda:0"):
        run.run({"x": torch.zeros(1, 1, 8)})


@pytest.mark.parametrize("eager_runs", [0, 1])
def test_graphs_replay_with_new_inputs_and_keep_old_outputs(eager_runs: int):
    run = runner(eager_runs)
    pairs = []
    for i in range(4):
        for shape in ((3, 4, 8), (1, 2, 8)):
            x = torch.randn(*shape, device="cuda") + i
            pairs.append((run.run({"x": x})["out"], x))
    for out, x in pairs:
        check(out, x)
    assert len(run._graphs) == 2


def test_outputs_may_be_the_graphs_own_memory():
    run = runner()
    x = torch.randn(3, 4, 8, device="cuda")
    first = run.run({"x": x}, clone=False)["out"]
    check(first, x)
    second = run.run({"x": x + 1}, clone=False)["out"]
    assert first.data_ptr() == second.data_ptr()
    check(second, x + 1)


def test_wrong_inputs_are_refused_before_and_after_capture():
    run = runner()
    x = torch.randn(3, 4, 8, device="cuda")
    for _ in range(2):
        with pytest.raises(InputError, match="expected float32"):
            run.run({"x": x.double()})
        with pytest.raises(InputError, match="unknown: \\['y'\\]"):
            run.run({"x": x, "y": x})
        with pytest.raises(InputError, match="missing"):
            run.run({})
        with pytest.raises(InputError, match="is on cpu; expected cuda:0"):
            run.run({"x": x.cpu()})
        check(run.run({"x": x})["out"], x)


def test_a_capture_that_fails_says_why_and_the_next_one_works():
    run = executor()
    pool, x = GraphPool(run.device), torch.randn(3, 4, 8, device="cuda")

    def work() -> torch.Tensor:
        made = run.run({"x": x})["out"]
        if torch.cuda.is_current_stream_capturing():
            raise ValueError("not in a capture")
        return made

    with pytest.raises(ValueError, match="not in a capture"):
        pool.capture(work)
    graph, out = pool.capture(lambda: run.run({"x": x})["out"])
    x.add_(1)
    graph.replay()
    check(out, x)


def test_inputs_with_odd_strides_are_replayed_right():
    run = runner()
    for _ in range(3):
        x = torch.randn(8, 4, 3, device="cuda").permute(2, 1, 0)
        check(run.run({"x": x})["out"], x)


def test_graphs_that_share_memory_do_not_overlap_across_streams_and_threads():
    run = runner()
    wrong: list[object] = []

    def work(seed: int) -> None:
        try:
            with torch.cuda.stream(torch.cuda.Stream()):
                for i in range(40):
                    x = torch.full((3 + seed % 2, 16, 8), float(seed + i), device="cuda")
                    out = run.run({"x": x})["out"]
                    expected = softmax_reference(x.cpu(), WEIGHTS)
                    if float((out.double().cpu() - expected).abs().max()) > 1e-4:
                        wrong.append((seed, i))
        except BaseException as error:  # noqa: BLE001 (a thread's failure must reach the test)
            wrong.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_a_callers_own_capture_gets_the_program_itself():
    run = runner()
    x = torch.randn(3, 4, 8, device="cuda")
    run.run({"x": x})
    graph, side = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        run.executor.run({"x": x})
        graph.capture_begin()
        out = run.run({"x": x})["out"]
        graph.capture_end()
    torch.cuda.synchronize()
    x.add_(1)
    graph.replay()
    check(out, x)


def language(*, graphs: bool) -> TunedModel:
    programs = (language_model("prefill"), language_model("decode"))
    return TunedModel(ModelParts(programs, {}, empty_replay(), {}), LANGUAGE, "cuda", graphs=graphs)


@pytest.mark.parametrize("graphs", [False, True])
def test_ragged_generation_equals_each_row_alone(graphs: bool):
    model = language(graphs=graphs)
    expected = [language_greedy(prompt, NEW, LANGUAGE) for prompt in PROMPTS]
    for _ in range(2):
        assert model.complete(PROMPTS, NEW) == expected
    eos = expected[2][3]
    steps = list(model.generate(PROMPTS, NEW, eos=[eos]))
    got = [[t for t in row if t is not None] for row in zip(*steps, strict=True)]
    assert got == [row[: row.index(eos) + 1] if eos in row else row for row in expected]


def test_generations_that_overlap_have_graphs_of_their_own():
    model = language(graphs=True)
    expected = [language_greedy(prompt, NEW, LANGUAGE) for prompt in PROMPTS]
    streams = [model.generate(PROMPTS, NEW) for _ in range(2)]
    interleaved = [list(pair) for pair in zip(*streams, strict=True)]
    for i in range(2):
        rows = [list(row) for row in zip(*(pair[i] for pair in interleaved), strict=True)]
        assert rows == expected


def test_cache_rows_are_written_where_they_lie():
    program = language_model("decode")
    run = Executor(program, bind_weights([program], LANGUAGE, "cuda"), {}, empty_replay(), {}, "cuda")
    replay = GraphRunner(run, GraphPool(run.device))
    cache = KVCache(program, 4, run.device)
    ids, positions = torch.tensor([[3], [4]], device="cuda"), torch.tensor([[0], [0]], device="cuda")
    for position in range(3):
        replay.run({"input_ids": ids, "positions": positions + position, **cache.slice(1, 3)})
    written = cache.slice(0, 4)["k_cache.0"].abs().sum(dim=(1, 3)) > 0
    assert written.nonzero().tolist() == [[r, p] for r in (1, 2) for p in range(3)]


def test_weights_stream_to_the_gpu_without_a_second_copy(tmp_path):
    from safetensors.torch import save_file

    n = 8
    big = {f"w{i}": torch.randn(1024, 4096) for i in range(n)}
    save_file(big, tmp_path / "model.safetensors")
    from tune_model.runtime.program import TensorType, Weight

    weights = tuple(Weight(name, TensorType("float32", (1024, 4096)), (name,)) for name in big)
    program = msgspec.structs.replace(softmax_program(), weights=weights)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    bound = bind_weights([program], tmp_path, "cuda")
    total = sum(t.nbytes for t in big.values())
    assert torch.cuda.max_memory_allocated() - before <= 1.15 * total
    assert all(torch.equal(bound[name].cpu(), big[name]) for name in big)
