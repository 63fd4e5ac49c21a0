"""Rows that come and go, prompts in padded parts, against the same model worked out token by token in float64."""

import random
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from small_programs import MAX_LENGTH, empty_replay, language_greedy, language_model, language_weights

from tune_model.runtime.execution.executor import InputError
from tune_model.runtime.generation.completion import Completion, CompletionFailedError, Generation
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


PROMPTS_THAT_ARE_NONE = {
    "token 1 of the prompt is 32; expected 0 to 31": [3, 32],
    "token 2 of the prompt is -1; expected 0 to 31": torch.tensor([3, 4, -1], dtype=torch.int16),
    "token 0 of the prompt is -1; expected 0 to 31": np.array([2**64 - 1], dtype=np.uint64),
    "cannot be read: Overflow": [2**70],
    "cannot be read: too many dimensions 'str'": ["a"],
    "cannot be read: .* NoneType": [None],
    "cannot be read: expected sequence of length 1": [[1], [2, 3]],
    r"a prompt is \(\); expected at least one token": 5,
    r"a prompt is \(1, 1\); expected": [[1]],
    "a prompt is torch.float32; expected integers": [1.9, 2.2],
    "a prompt is torch.bool; expected integers": [True, False],
    "a prompt is torch.complex64; expected integers": [1j],
}


@pytest.mark.parametrize("message", PROMPTS_THAT_ARE_NONE)
def test_prompts_that_are_none_are_refused_at_once(model: TunedModel, message: str):
    """Numbers past the embedding's end ended in an IndexError of a later step, or were read from other memory."""
    scheduler = padded(model, 1)
    with pytest.raises(InputError, match=message):
        scheduler.submit(PROMPTS_THAT_ARE_NONE[message], Generation(2))  # type: ignore[arg-type]
    assert scheduler.idle


@pytest.mark.parametrize("make", [torch.tensor, np.array, list])
def test_a_queued_prompt_is_a_copy(model: TunedModel, make: Callable[[list[int]], Any]):
    """Callers that used a buffer again changed prompts that waited."""
    scheduler = padded(model, 1)
    given = make([3, 1, 4])
    completion = scheduler.submit(given, Generation(4))
    given[1] = 7
    drain(scheduler)
    assert completion.tokens == language_greedy([3, 1, 4], 4, WEIGHTS)
    assert completion.tokens != language_greedy([3, 7, 4], 4, WEIGHTS)


class Fault:
    """Lets the n-th call of a function fail, in place of it or after it is done."""

    def __init__(self, at: int, *, after: bool = False, until: int | None = None) -> None:
        self.calls = 0
        self._at, self._until, self._after = at, until or at, after

    def put(self, monkeypatch: pytest.MonkeyPatch, owner: object, name: str) -> None:
        function = getattr(owner, name)

        def failing(*args: Any, **kwargs: Any) -> Any:
            self.calls += 1
            fails = self._at <= self.calls <= self._until
            if fails and not self._after:
                raise torch.OutOfMemoryError("out of luck")
            made = function(*args, **kwargs)
            if fails:
                raise torch.OutOfMemoryError("out of luck")
            return made

        monkeypatch.setattr(owner, name, failing)


READING = {
    "the program": lambda s: (s._prompts, "run"),
    "parameters of the sampling": lambda s: (s._rows, "prepare"),
    "the start of its row": lambda s: (s._rows, "start"),
    "the transfer of its token": lambda s: (s._readback, "start"),
}


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("where", READING)
def test_a_prompt_that_fails_costs_itself(model: TunedModel, monkeypatch: pytest.MonkeyPatch, where: str, after: bool):
    """Its part counted as read before it ran: the next step decoded from a cache that was never filled."""
    scheduler = padded(model, 3)
    first = scheduler.submit([3, 1, 4], Generation(9))
    scheduler.step()
    Fault(1, after=after).put(monkeypatch, *READING[where](scheduler))
    failing, second = (scheduler.submit(p, Generation(5)) for p in ([5, 9, 2], [8, 8, 1, 30]))
    with pytest.raises(CompletionFailedError, match="request 1, a prompt of 3 tokens: out of luck") as caught:
        scheduler.step()
    assert caught.value.completion is failing
    assert (failing.finish, failing.tokens) == ("error", [])
    assert isinstance(failing.error, torch.OutOfMemoryError)
    assert scheduler.state().running == 2
    drain(scheduler)
    assert failing.tokens == []
    assert first.tokens == language_greedy([3, 1, 4], 9, WEIGHTS)
    assert second.tokens == language_greedy([8, 8, 1, 30], 5, WEIGHTS)
    state = scheduler.state()
    assert (state.running, state.waiting, state.completed, state.failed) == (0, 0, 3, 1)


DECODING = {
    "the program": lambda s: (s._decoder, "step", False),
    "memory for its tokens": lambda s: (s._readback, "reserve", False),
    "moving a row": lambda s: (s._rows, "move", False),
    "copying a row": lambda s: (s._rows.cache, "copy_row", True),
    "letting a row rest": lambda s: (s._rows, "rest", False),
    "handing tokens out": lambda s: (s._readback, "finish", False),
}


@pytest.mark.parametrize("at", [1, 2])
@pytest.mark.parametrize("where", DECODING)
def test_a_step_that_fails_may_be_repeated(model: TunedModel, monkeypatch: pytest.MonkeyPatch, where: str, at: int):
    scheduler = padded(model, 8)
    short = [scheduler.submit([1, 2, 3], Generation(3)) for _ in range(6)]
    long = scheduler.submit([4, 5], Generation(12))  # moves to the front when the others have left
    late = scheduler.submit([7, 30], Generation(4, sampling=Sampling(repetition_penalty=1.3)))
    scheduler.step()  # prompts are read
    owner, name, after = DECODING[where](scheduler)
    fault = Fault(at, after=after)
    fault.put(monkeypatch, owner, name)
    failures = 0
    while not scheduler.idle:
        try:
            scheduler.step()
        except torch.OutOfMemoryError:
            failures += 1
    assert failures == (1 if fault.calls >= at else 0)
    assert fault.calls >= 1
    assert all(c.tokens == language_greedy([1, 2, 3], 3, WEIGHTS) for c in short)
    assert long.tokens == language_greedy([4, 5], 12, WEIGHTS)
    assert len(late.tokens) == 4
    assert scheduler.state().failed == 0
    assert scheduler._rows._moving.sum() == 0


def test_a_move_that_fails_leaves_no_row_moving(model: TunedModel, monkeypatch: pytest.MonkeyPatch):
    """A row that nobody uses must not advance: its position would leave the cache."""
    scheduler = padded(model, 4)
    short = [scheduler.submit([1, 2, 3], Generation(2)) for _ in range(3)]
    long = scheduler.submit([4, 5], Generation(12))
    Fault(1, after=True).put(monkeypatch, scheduler._rows, "move")
    with pytest.raises(torch.OutOfMemoryError):
        drain(scheduler)
    assert all(completion.finish == "length" for completion in short)
    scheduler.cancel([long])
    drain(scheduler)
    assert scheduler._rows._moving.sum() == 0
    again = scheduler.submit([9, 9], Generation(3))
    drain(scheduler)
    assert again.tokens == language_greedy([9, 9], 3, WEIGHTS)


def test_aborted_rows_make_room_for_those_that_wait(model: TunedModel, monkeypatch: pytest.MonkeyPatch):
    scheduler = padded(model, 2)
    scheduler.prompt_tokens = 4
    running, reading = (scheduler.submit(p, Generation(5)) for p in ([3, 1, 4], [5] * 19))
    waiting = scheduler.submit([9, 9], Generation(3))
    scheduler.step()
    Fault(1, until=3).put(monkeypatch, scheduler._decoder, "step")
    with pytest.raises(torch.OutOfMemoryError):
        scheduler.step()
    blame = RuntimeError("steps keep failing")
    assert scheduler.abort(blame) == [running, reading]
    assert running.finish == reading.finish == "error"
    assert running.error is blame
    monkeypatch.undo()
    drain(scheduler)
    assert waiting.tokens == language_greedy([9, 9], 3, WEIGHTS)
    assert (scheduler.state().completed, scheduler.state().failed) == (3, 2)
    assert scheduler.abort(blame) == []


def test_a_failed_generation_raises_what_happened_and_leaves_the_model_usable(
    model: TunedModel, monkeypatch: pytest.MonkeyPatch
):
    wanted = [[3, 1, 4], [5, 9, 2]]
    expected = model.complete(wanted, 4)
    assert model._own is not None
    Fault(2).put(monkeypatch, model._own._prompts, "run")
    with pytest.raises(torch.OutOfMemoryError, match="out of luck") as caught:
        model.complete(wanted, 4)
    assert caught.value.__notes__ == ["while prompt 1 was read"]
    assert model.complete(wanted, 4) == expected


def test_cancelled_prompts_wait_no_longer(model: TunedModel):
    """They counted as waiting, and were kept, until a row was free: clients that left could fill a server's queue."""
    scheduler = padded(model, 1)
    kept = scheduler.submit([3, 1, 4], Generation(12))
    waiting = [scheduler.submit([8], Generation(2)) for _ in range(5)]
    scheduler.step()
    scheduler.cancel(waiting[1:4])
    scheduler.step()
    assert kept.finish is None
    assert (scheduler.state().waiting, scheduler.state().completed) == (2, 3)
    drain(scheduler)
    assert [c.finish for c in waiting] == ["length", *["cancelled"] * 3, "length"]


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(temperature=1e300),
        Sampling(temperature=1e-300),
        Sampling(temperature=1.0, top_k=10**30),
        Sampling(temperature=1.0, top_p=1e-300),
        Sampling(repetition_penalty=1e300),
        Sampling(temperature=1.0, repetition_penalty=1e-300),
    ],
)
def test_extreme_samplings_are_the_nearest_that_run(model: TunedModel, sampling: Sampling):
    """Numbers past float32's range raised in the step that read the prompt, or made every token the last one."""
    scheduler = padded(model, 1)
    completion = scheduler.submit([3, 1, 4], Generation(6, sampling=sampling))
    drain(scheduler)
    assert len(completion.tokens) == 6
    if sampling.temperature < 1e-3 < sampling.repetition_penalty < 2 or sampling.top_p < 1e-3:
        assert completion.tokens == language_greedy([3, 1, 4], 6, WEIGHTS)
    else:
        assert len(set(completion.tokens)) > 1


def test_schedulers_of_one_model_run_beside_each_other(model: TunedModel):
    """Two threads step a scheduler each while a third calls the model: every answer is what it is alone."""
    wanted = prompts(11, 12)
    made: dict[int, list[int]] = {}
    wrong: list[object] = []
    ids = torch.tensor([[3, 1, 4]])
    expected = model(ids)

    def serve(start: int) -> None:
        scheduler = padded(model, 3)
        answers = {i: scheduler.submit(wanted[i], Generation(4)) for i in range(start, len(wanted), 2)}
        drain(scheduler)
        made.update({i: completion.tokens for i, completion in answers.items()})

    def call() -> None:
        for _ in range(40):
            out = model(ids)
            if not torch.equal(torch.as_tensor(out), torch.as_tensor(expected)):
                wrong.append(out)

    threads = [*(threading.Thread(target=serve, args=(i,)) for i in (0, 1)), threading.Thread(target=call)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert [made[i] for i in range(len(wanted))] == [language_greedy(p, 4, WEIGHTS) for p in wanted]


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
