"""The ratios that `bench` prints are those of races: the median of the pairs, and the sign test's interval."""

import random
from collections.abc import Iterator
from contextlib import nullcontext

import pytest
import torch

from tune_model.pipeline.bench import interleave as module
from tune_model.pipeline.bench.interleave import Contender, device_time_ms, interleave
from tune_model.tune.measuring.interval import FEWEST_PAIRS, paired_ratio


def made_up(rounds: int, dice: random.Random) -> Iterator[tuple[float, float]]:
    """Yield times of calls, with an upper tail as on a machine that others use."""
    for _ in range(2 * rounds):
        ms = 10.0 + dice.paretovariate(1.2)
        yield ms, ms


def test_a_ratio_is_that_of_a_race(monkeypatch: pytest.MonkeyPatch):
    times = made_up(11, random.Random(4))  # noqa: S311 (repeatable noise)
    taken: dict[str, list[float]] = {"tuned": [], "eager": []}

    def once(run, _device):  # type: ignore[no-untyped-def]
        found = next(times)
        taken[run()].append(found[0])
        return found

    monkeypatch.setattr(module, "_once", once)
    contenders = [Contender(name, lambda name=name: name) for name in taken]
    ours, theirs = interleave(contenders, torch.device("cpu"), rounds=11)
    expected = paired_ratio(taken["eager"], taken["tuned"])
    assert (theirs.ratio, theirs.ratio_low, theirs.ratio_high) == (expected.median, expected.low, expected.high)
    assert (ours.ratio, ours.ratio_low, ours.ratio_high) == (1.0, 1.0, 1.0)


@pytest.mark.parametrize("rounds", [6, 11, 16, 31])
def test_the_interval_of_bench_holds_the_truth_as_often_as_it_says(monkeypatch: pytest.MonkeyPatch, rounds: int):
    """Student's t of the next larger table entry was too narrow for every number of rounds between two entries."""
    dice = random.Random(rounds)  # noqa: S311 (repeatable noise)
    inside = 0
    for _ in range(300):
        times = made_up(rounds, dice)
        monkeypatch.setattr(module, "_once", lambda _run, _device, times=times: next(times))
        _, theirs = interleave([Contender(name, int) for name in "ab"], torch.device("cpu"), rounds=rounds)
        inside += theirs.ratio_low <= 1.0 <= theirs.ratio_high
    assert inside / 300 >= 0.93


def test_rounds_that_take_long_are_as_many_as_an_interval_needs(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(module, "_once", lambda _run, _device: (1.0, 1.0))
    found = interleave([Contender("tuned", int)], torch.device("cpu"), rounds=50, budget_s=0.0)
    assert found[0].rounds == FEWEST_PAIRS


def test_the_device_is_busy_while_a_call_is_launched(monkeypatch: pytest.MonkeyPatch):
    """Device time began with the launch on an idle device, so the host's work before the first kernel was in it."""
    log: list[str] = []

    class Event:
        def __init__(self, *, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            log.append("mark")

        def elapsed_time(self, _after: "Event") -> float:
            return 2.5

    stand_ins = {
        "Event": Event,
        "device": lambda _device: nullcontext(),
        "synchronize": lambda _device: log.append("wait"),
        "_sleep": lambda _cycles: log.append("spin"),
    }
    for name, stand_in in stand_ins.items():
        monkeypatch.setattr(torch.cuda, name, stand_in)
    assert device_time_ms(lambda: log.append("run"), torch.device("cuda", 0)) == 2.5
    assert log == ["wait", "spin", "mark", "run", "mark", "wait"]
