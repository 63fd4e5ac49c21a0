"""Whole models on any device, several at once, in threads, on side streams, inside captures; on real GPUs."""

import threading

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

from tune_model.runtime.generation.completion import Generation
from tune_model.runtime.generation.sampling import Sampling
from tune_model.runtime.tuned import ModelParts, TunedModel

pytestmark = pytest.mark.gpu

WEIGHTS = softmax_weights()
LANGUAGE = language_weights()
PROMPTS = [[3, 1, 4, 1, 5], [9], [2, 6, 5, 3, 5, 8, 9, 7, 9]]
NEW = 8
GRIDS = {"prefill": {"batch": (1,), "sequence": (4, 8)}, "decode": {"batch": (1, 4), "context": (4, 16)}}

second_gpu = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")


def forward(device: str = "cuda") -> TunedModel:
    return TunedModel(ModelParts((softmax_program(),), {"one": torch.ones(1)}, empty_replay(), {}), WEIGHTS, device)


def language(device: str = "cuda", weights: dict[str, torch.Tensor] = LANGUAGE) -> TunedModel:
    programs = (language_model("prefill"), language_model("decode"))
    return TunedModel(ModelParts(programs, {}, empty_replay(), {}, GRIDS), weights, device)


def greedy(weights: dict[str, torch.Tensor] = LANGUAGE) -> list[list[int]]:
    return [language_greedy(prompt, NEW, weights) for prompt in PROMPTS]


def check(out: torch.Tensor, x: torch.Tensor) -> None:
    torch.testing.assert_close(out.double().cpu(), softmax_reference(x.cpu(), WEIGHTS), atol=1e-5, rtol=1e-5)


@second_gpu
def test_another_device_than_the_current_one():
    model, text = forward("cuda:1"), language("cuda:1")
    x = torch.randn(3, 4, 8)
    for _ in range(3):
        out = model(x)
        assert out.device == torch.device("cuda", 1)
        check(out, x)
        assert text.complete(PROMPTS, NEW) == greedy()
    assert torch.cuda.current_device() == 0


@second_gpu
def test_models_on_two_devices_take_turns():
    models = [language("cuda:0"), language("cuda:1")]
    streams = [model.generate(PROMPTS, NEW) for model in models]
    steps = [list(pair) for pair in zip(*streams, strict=True)]
    for i in range(2):
        assert [list(row) for row in zip(*(pair[i] for pair in steps), strict=True)] == greedy()


def test_two_models_on_one_device_do_not_mix_their_graphs():
    other = {name: -tensor for name, tensor in LANGUAGE.items()}
    first, second = language(), language(weights=other)
    for _ in range(2):
        streams = [first.generate(PROMPTS, NEW), second.generate(PROMPTS, NEW)]
        steps = [list(pair) for pair in zip(*streams, strict=True)]
        for i, expected in enumerate((greedy(), greedy(other))):
            assert [list(row) for row in zip(*(pair[i] for pair in steps), strict=True)] == expected


def test_threads_generate_side_by_side():
    model, expected, wrong = language(), greedy(), []

    def work() -> None:
        try:
            with torch.cuda.stream(torch.cuda.Stream()):
                made = [model.complete(PROMPTS, NEW) for _ in range(3)]
                wrong.extend(tokens for tokens in made if tokens != expected)
        except BaseException as error:  # noqa: BLE001 (a thread's failure must reach the test)
            wrong.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_a_scheduler_works_on_the_stream_it_was_made_on():
    model = language()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        scheduler = model.scheduler(4)
    prompt = torch.tensor(PROMPTS[2], device="cuda")  # made on another stream than it is read on
    asked = [scheduler.submit(p, Generation(NEW)) for p in (PROMPTS[0], PROMPTS[1], prompt)]
    while not scheduler.idle:
        scheduler.step()
    assert [c.tokens for c in asked] == greedy()


def test_rows_join_leave_and_move_under_graphs():
    model = language()
    scheduler = model.scheduler(8)
    scheduler.warm_up([Sampling(), Sampling(temperature=1.0, top_k=3)])
    captured = scheduler.state().graphs
    assert captured == 2 * 4 * 2  # 1, 2, 4 and 8 rows; two contexts; two kinds of sampling
    asked = [(p, 1 + 3 * i) for i, p in enumerate(PROMPTS * 3) if len(p) + 3 * i < 24]
    open_ = [(p, n, scheduler.submit(p, Generation(n))) for p, n in asked]
    drawn = Sampling(temperature=2.0, top_k=3, seed=5)
    sampled = scheduler.submit(PROMPTS[0], Generation(NEW, sampling=drawn))
    while not scheduler.idle:
        scheduler.step()
    for prompt, new, completion in open_:
        assert completion.tokens == language_greedy(prompt, new, LANGUAGE)
    assert scheduler.state().graphs == captured
    assert model.complete([PROMPTS[0]], NEW, sampling=[drawn]) == [sampled.tokens]


def test_draws_are_those_of_a_cpu():
    """Numbers are drawn on the host, so equal logits give equal tokens; in float32 the logits all but agree."""
    cpu = language("cpu")
    sampling = Sampling(temperature=1.5, top_k=9, top_p=0.95, seed=3, repetition_penalty=1.2)
    assert language().complete(PROMPTS, NEW, sampling=sampling) == cpu.complete(PROMPTS, NEW, sampling=sampling)


def test_the_first_call_of_a_program_may_be_inside_a_capture():
    forward()(torch.zeros(1, 1, 8))  # libraries are ready; the next model's plans are not
    model = forward()
    x = torch.randn(3, 4, 8, device="cuda")
    graph, side = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        graph.capture_begin()
        out = model(x)
        graph.capture_end()
    torch.cuda.current_stream().wait_stream(side)
    for i in range(3):
        x.fill_(float(i))
        graph.replay()
        torch.cuda.synchronize()
        check(out, x)


def test_weights_that_are_replaced_replace_the_graphs_too():
    """Memory of the caller is not written to, so graphs over it are of no use after a reload."""
    mine = {name: tensor.cuda() for name, tensor in LANGUAGE.items()}
    model = language(weights=mine)
    assert model.complete(PROMPTS, NEW) == greedy()
    other = {name: -tensor for name, tensor in LANGUAGE.items()}
    model.reload_weights({name: tensor.cuda() for name, tensor in other.items()})
    assert model.complete(PROMPTS, NEW) == greedy(other)
    assert all(torch.equal(mine[name].cpu(), LANGUAGE[name]) for name in mine)


def test_prompts_of_one_length_are_replayed_from_graphs():
    model = language()
    prompt = [7, 1, 30, 2, 2, 9, 4]
    for i in range(4):
        text = [i, *prompt[1:]]
        assert model.complete([text], 3)[0] == language_greedy(text, 3, LANGUAGE)
