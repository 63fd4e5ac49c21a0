"""Rows that come and go, prompts in padded parts, against the same model worked out token by token in float64."""

import random
import threading

import pytest
import torch
from small_programs import MAX_LENGTH, empty_replay, language_greedy, language_model, language_weights

from tune_model.runtime.execution.executor import InputError
from tune_model.runtime.generation.completion import Completion, Generation
from tune_model.runtime.generation.sampling import Sampling
from tune_model.runtime.generation.scheduler import Scheduler
from tune_model.runtime.tuned import ModelParts, TunedModel

WEIGHTS = language_weights()
GRIDS = {"prefill": {"batch": (1,), "sequence": (4, 8)}, "decode": {"batch": (1, 4), "context": (4, 16)}}


@pytest.fixture(scope="module")
def model() -> TunedModel:
    programs = (language_model("prefill"), language_model("decode"))
    return TunedModel(ModelParts(programs, {}, empty_replay(), {}, GRIDS), WEIGHTS, "cpu")


def padded(model: TunedModel, rows: int) -> Scheduler:
    """As on CUDA: rows and lengths rounded up."""
    return Scheduler(model.language(), rows, exact=False)


def drain(scheduler: Scheduler) -> None:
    while not scheduler.idle:
        scheduler.step()


def prompts(seed: int, count: int) -> list[list[int]]:
    draw = random.Random(seed)  # noqa: S311 - test data
    return [[draw.randrange(32) for _ in range(draw.randint(1, 19))] for _ in range(count)]


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("prompt_tokens", [None, 1, 8])
def test_rows_that_join_and_leave_get_what_each_would_alone(model: TunedModel, exact: bool, prompt_tokens: int | None):
    """Twelve requests of different lengths over five rows, submitted while others run, in padded parts of 4 and 8."""
    scheduler = Scheduler(model.language(), 5, exact=exact)
    scheduler.prompt_tokens = prompt_tokens
    draw = random.Random(3)  # noqa: S311 - test data
    open_: list[tuple[list[int], int]] = [(p, draw.randint(1, 6)) for p in prompts(4, 12)]
    asked: list[tuple[list[int], int, Completion]] = []
    widths = set()
    while open_ or not scheduler.idle:
        for _ in range(draw.randint(0, 2)):
            if open_:
                prompt, new = open_.pop()
                asked.append((prompt, new, scheduler.submit(prompt, Generation(new))))
        scheduler.step()
        widths.add(scheduler.state().running)
    assert len(widths) > 2
    for prompt, new, completion in asked:
        assert completion.tokens == language_greedy(prompt, new, WEIGHTS)
        assert completion.finish == "length"
    state = scheduler.state()
    assert (state.waiting, state.running, state.completed) == (0, 0, 12)
    assert state.prompt_tokens == sum(len(p) for p, _, _ in asked)
    assert state.new_tokens == sum(new for _, new, _ in asked)


def test_a_prompt_in_parts_is_not_overwritten_by_steps_of_others(model: TunedModel):
    """A row that is being read in lies inside the rows a step runs on: the step must not write over its first slot."""
    scheduler = padded(model, 4)
    scheduler.prompt_tokens = 1
    long, short = [5, 9, 2, 7, 7, 1, 0, 30, 12, 4, 4, 8, 19, 3, 3, 6, 21, 2], [3, 1, 4]
    first = scheduler.submit(short, Generation(4))
    second = scheduler.submit(short, Generation(12))
    while first.finish is None:
        scheduler.step()
    third = scheduler.submit(long, Generation(4))  # takes the first row, in three parts, while the second one decodes
    alone = padded(model, 1)
    for one, completion in ((scheduler, third), (alone, alone.submit(long, Generation(4)))):
        while not completion.tokens:
            one.step()
    for name, cache in alone.cache.slice(0, 1).items():
        torch.testing.assert_close(scheduler.cache.slice(0, 1)[name][:, :, :18], cache[:, :, :18])
    drain(scheduler)
    assert third.tokens == language_greedy(long, 4, WEIGHTS)
    assert second.tokens == language_greedy(short, 12, WEIGHTS)


def test_steps_shrink_when_rows_leave(model: TunedModel, monkeypatch: pytest.MonkeyPatch):
    scheduler = padded(model, 8)
    ran: list[int] = []
    step = scheduler._decoder.step
    monkeypatch.setattr(scheduler._decoder, "step", lambda kind: (ran.append(kind.rows), step(kind))[1])
    short = [scheduler.submit([1, 2, 3], Generation(3)) for _ in range(6)]
    long = scheduler.submit([4, 5], Generation(12))
    drain(scheduler)
    assert ran[0] == 8
    assert ran[-1] == 1
    assert long.tokens == language_greedy([4, 5], 12, WEIGHTS)
    assert all(c.tokens == language_greedy([1, 2, 3], 3, WEIGHTS) for c in short)


def test_a_moved_row_keeps_its_sampling(model: TunedModel):
    sampling = Sampling(temperature=3.0, top_k=9, repetition_penalty=1.4, seed=77)
    alone = padded(model, 1)
    expected = alone.submit([4, 5], Generation(12, sampling=sampling))
    drain(alone)
    scheduler = padded(model, 4)
    for _ in range(3):
        scheduler.submit([1, 2, 3], Generation(3))
    moved = scheduler.submit([4, 5], Generation(12, sampling=sampling))
    drain(scheduler)
    assert moved.tokens == expected.tokens


def test_eos_frees_the_row(model: TunedModel):
    expected = language_greedy([3, 1, 4], 12, WEIGHTS)
    eos = expected[3]
    scheduler = padded(model, 1)
    first = scheduler.submit([3, 1, 4], Generation(12, frozenset({eos})))
    second = scheduler.submit([9, 9], Generation(3))
    drain(scheduler)
    assert first.tokens == expected[: expected.index(eos) + 1]
    assert first.finish == "eos"
    assert second.tokens == language_greedy([9, 9], 3, WEIGHTS)


def test_cancelled_completions_leave_without_a_trace(model: TunedModel):
    scheduler = padded(model, 2)
    kept = scheduler.submit([3, 1, 4], Generation(8))
    running = scheduler.submit([7], Generation(20))
    waiting = scheduler.submit([8], Generation(20))
    last = scheduler.submit([9, 9], Generation(3))
    scheduler.step()
    scheduler.cancel([running, waiting])
    drain(scheduler)
    assert running.finish == waiting.finish == "cancelled"
    assert waiting.tokens == []
    assert len(running.tokens) < 20
    assert kept.tokens == language_greedy([3, 1, 4], 8, WEIGHTS)
    assert last.tokens == language_greedy([9, 9], 3, WEIGHTS)
    assert scheduler.state().completed == 4


def test_prompts_come_from_many_threads(model: TunedModel):
    scheduler = padded(model, 4)
    wanted = prompts(8, 24)
    answers: dict[int, Completion] = {}

    def submit(start: int) -> None:
        for index in range(start, 24, 4):
            answers[index] = scheduler.submit(wanted[index], Generation(3))

    threads = [threading.Thread(target=submit, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    while len(answers) < 24 or not scheduler.idle:
        scheduler.step()
    for thread in threads:
        thread.join()
    for index, prompt in enumerate(wanted):
        assert answers[index].tokens == language_greedy(prompt, 3, WEIGHTS)


def test_a_models_scheduler_reads_in_one_part_a_step(model: TunedModel):
    scheduler = model.scheduler()
    assert scheduler.cache.rows == 8
    assert scheduler.prompt_tokens == 8
    with pytest.raises(InputError, match="9 rows asked for; the decode program takes 1 to 8"):
        model.scheduler(9)


def test_prompts_that_do_not_fit_are_refused_at_once(model: TunedModel):
    scheduler = padded(model, 1)
    with pytest.raises(InputError, match=f"the cache holds {MAX_LENGTH} per row"):
        scheduler.submit([1] * MAX_LENGTH, Generation(2))
    with pytest.raises(InputError, match="max_new_tokens is -1"):
        Generation(-1)
    assert scheduler.submit([1] * MAX_LENGTH, Generation(1)).finish is None
    drain(scheduler)


def test_nothing_is_captured_on_a_cpu(model: TunedModel):
    scheduler = padded(model, 2)
    scheduler.warm_up()
    assert scheduler.state().graphs == 0
    scheduler.submit([1], Generation(2))
    with pytest.raises(InputError, match="before the first prompt"):
        scheduler.warm_up()


def test_strict_models_run_prompts_whole():
    """The continuation's attention is never tuned, so a strict model could not run it."""
    programs = (language_model("prefill"), language_model("decode"))
    strict = TunedModel(ModelParts(programs, {}, empty_replay(), {}, GRIDS), WEIGHTS, "cpu", strict=True)
    assert padded(strict, 1).buckets.chunk == MAX_LENGTH
    prompt = prompts(5, 1)[0] * 2
    assert torch.tensor(strict.complete([prompt[:19]], 2)).shape == (1, 2)
