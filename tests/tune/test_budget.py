"""Time goes where it is worth most, ends when it should, and what it bought is used."""

import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from tuning_fakes import TARGET, FakeClock, FakeFamily, RecordedDevice, linear_plan, open_hostile

from tune_model.extract.task import Plan
from tune_model.tune.budget import Budget
from tune_model.tune.candidate import Built, Candidate, Rejected
from tune_model.tune.choice import Tuning
from tune_model.tune.device import Bench, Passed, Samples
from tune_model.tune.estimate import floor_us
from tune_model.tune.events import Event, TaskStarted
from tune_model.tune.families.aten import FAMILY as ATEN
from tune_model.tune.measuring.policy import Rung
from tune_model.tune.measuring.worker import DeviceWorker
from tune_model.tune.options import TuneOptions
from tune_model.tune.tuner import tune_with
from tune_model.tune.workshop import Workshop


def test_without_a_limit_nothing_ever_ends():
    clock = FakeClock()
    budget = Budget(None, clock)
    budget.allot(1.0, 10.0)
    clock.now += 1e9
    assert not budget.is_limited
    assert not budget.is_spent
    assert not budget.is_searched_out
    assert budget.left_s > 0


def test_shares_follow_worth_and_what_is_left_goes_on():
    clock = FakeClock()
    budget = Budget(100.0, clock)
    budget.allot(3.0, 4.0)
    clock.now += 74.0
    assert not budget.is_spent
    clock.now -= 64.0  # the first needed 10 of its 75 seconds
    budget.allot(1.0, 1.0)
    clock.now += 89.0
    assert not budget.is_spent
    clock.now += 1.0
    assert budget.is_spent
    assert budget.is_searched_out


def test_the_guards_time_is_kept_back():
    clock = FakeClock()
    budget = Budget(100.0, clock)
    budget.note_open(5.0)
    budget.note_open(1.0)
    budget.note_final(3.0, 6)
    assert budget.search_left_s == 100.0
    for task in range(5):
        budget.note_winner(str(task), is_confirmed=False)
    budget.note_winner("4", is_confirmed=True)
    assert budget.search_left_s == pytest.approx(100.0 - 5.0 - 4 * (1.0 + 1.0))
    for task in range(1000):
        budget.note_winner(str(task), is_confirmed=False)
    assert budget.search_left_s == pytest.approx(60.0)
    clock.now += 109.0
    assert budget.left_s == pytest.approx(1.0)


def test_a_share_is_never_too_small_to_time_anything():
    clock = FakeClock()
    budget = Budget(100.0, clock)
    budget.note_open(2.0)
    budget.note_open(2.0)
    budget.note_final(1.0, 2)
    budget.allot(1e-9, 1.0)
    clock.now += 5.0
    assert not budget.is_spent
    clock.now += 2.0
    assert budget.is_spent


ROWS = (1, 8, 64)


class ByRows(RecordedDevice):
    """The extern's time depends on the task; every timing takes a while on the device's own clock."""

    def __init__(self, extern: dict[int, float], fast: float, takes_s: float = 0.0) -> None:
        super().__init__({"aten": 0.0, "fast": fast})
        self.clock = FakeClock()
        self.extern = extern
        self.takes_s = takes_s
        self.timed: list[tuple[int, str]] = []

    def open(self, bench: Bench) -> Passed | Rejected:
        self.rows = int(bench.task.form.parameters[0].type.shape[0])
        self.times["aten"] = self.extern[self.rows]
        return super().open(bench)

    def time(self, candidate: Candidate, built: Built, rung: Rung) -> Samples | Rejected:
        self.clock.now += self.takes_s
        self.timed.append((self.rows, candidate.family))
        return super().time(candidate, built, rung)

    def compare(self, candidates: tuple[tuple[Candidate, Built], ...], rung: Rung) -> tuple[Samples | Rejected, ...]:
        self.clock.now += self.takes_s
        return super().compare(candidates, rung)


def run(folder: Path, plan: Plan, device: ByRows, **options: float) -> tuple[Tuning, list[Event]]:
    events: list[Event] = []
    families = (ATEN, FakeFamily("fast", tuple((("n", n),) for n in range(30))))
    settings = TuneOptions(folder / "records.sqlite", folder / "kernels", build_workers=2, **options)  # type: ignore[arg-type]
    return tune_with(plan, Workshop(families, TARGET, device, settings, events.append, device.clock)), events


def order(plan: Plan, events: list[Event]) -> list[int]:
    rows = {task.key: int(task.task.form.parameters[0].type.shape[0]) for task in plan.tasks}
    return list(dict.fromkeys(rows[e.task] for e in events if isinstance(e, TaskStarted)))


def test_races_come_in_the_order_of_weight_times_possible_gain(tmp_path: Path):
    """All weigh the same; the extern of the largest is at its floor already, that of the middle one far above."""
    plan = linear_plan(*ROWS)
    floors = {rows: floor_us(task, TARGET) for rows, task in zip(ROWS, plan.tasks, strict=True)}
    device = ByRows({1: floors[1] * 3, 8: floors[8] * 9, 64: floors[64]}, fast=0.1)
    _, events = run(tmp_path / "a", plan, device, budget_s=60.0)
    assert order(plan, events) == [8, 1, 64]
    assert sorted(device.timed[:3]) == [(rows, "aten") for rows in ROWS]  # the survey
    heavy = msgspec.structs.replace(plan.tasks[0], weight=100.0)
    plan = msgspec.structs.replace(plan, tasks=(heavy, *plan.tasks[1:]))
    _, events = run(tmp_path / "b", plan, device, budget_s=60.0)
    assert order(plan, events) == [1, 8, 64]


def test_every_task_gets_its_share_and_the_best_so_far_is_used(tmp_path: Path):
    plan = linear_plan(*ROWS)
    device = ByRows(dict.fromkeys(ROWS, 400.0), fast=5.0, takes_s=0.05)
    tuning, _ = run(tmp_path, plan, device, budget_s=3.0)
    assert device.clock.now - 100.0 == tuning.seconds < 1.2 * 3.0
    assert tuning.stopped == "budget"
    assert {c.status for c in tuning.choices} == {"tuned"}
    counts = [sum(rows == r and family == "fast" for rows, family in device.timed) for r in ROWS]
    assert min(counts) >= 5
    assert max(counts) < 40
    assert {c.winner.family for c in tuning.choices} == {"fast"}
    rest, _ = run(tmp_path, plan, ByRows(dict.fromkeys(ROWS, 400.0), fast=5.0))
    assert rest.stopped == ""
    assert {c.winner for c in rest.choices} == {Candidate("fast", (("n", 0),))}


def test_what_one_race_leaves_goes_to_those_that_were_cut_short(tmp_path: Path):
    """The heavier one finishes early; the lighter one's share alone would not have been enough."""
    plan = linear_plan(1, 8)
    heavy = msgspec.structs.replace(plan.tasks[1], weight=3.0)
    plan = msgspec.structs.replace(plan, tasks=(plan.tasks[0], heavy))
    device = ByRows(dict.fromkeys(ROWS, 400.0), fast=5.0, takes_s=0.02)
    tuning, _ = run(tmp_path, plan, device, budget_s=8.0)
    assert tuning.stopped == ""
    assert [c.status for c in tuning.choices] == ["tuned", "tuned"]


def test_an_unsearched_task_still_tells_the_externs_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("tune_model.tune.tuner.survey_seconds", lambda _target, _tasks: 0.0)
    plan = linear_plan(*ROWS)
    heavy = msgspec.structs.replace(plan.tasks[0], weight=1e9)
    plan = msgspec.structs.replace(plan, tasks=(heavy, *plan.tasks[1:]))
    device = ByRows(dict.fromkeys(ROWS, 400.0), fast=5.0, takes_s=0.05)
    tuning, _ = run(tmp_path, plan, device, budget_s=4.0 / 3)
    assert [c.status for c in tuning.choices] == ["tuned", "not searched", "not searched"]
    assert [c.baseline_us for c in tuning.choices][1:] == [400.0, 400.0]


def hanging(
    folder: Path, budget_s: float | None, clock: Callable[[], float] = time.monotonic
) -> tuple[DeviceWorker, Workshop]:
    device = DeviceWorker(TARGET, factory=open_hostile, step_s=600.0)
    options = TuneOptions(folder / "records.sqlite", folder / "kernels", budget_s=budget_s)
    shop = Workshop((ATEN, FakeFamily("hangs", ((),))), TARGET, device, options, lambda _event: None, clock)
    device.seconds_left = shop.seconds_left
    return device, shop


def test_a_candidate_that_hangs_does_not_outlast_the_budget(tmp_path: Path):
    """Time passes while it hangs: half a second each time that the wait looks at the clock."""
    clock = FakeClock()
    device, shop = hanging(tmp_path, 8.0, clock)

    def look() -> float:
        if device._is_open:
            clock.now += 0.5
        return shop.seconds_left()

    device.seconds_left = look
    tuning = tune_with(linear_plan(1), shop)
    assert 8.0 <= clock.now - 100.0 < 1.2 * 8.0
    assert (tuning.stopped, tuning.choices[0].status) == ("budget", "not searched")
    assert tuning.choices[0].rejections == ()  # it was not given the time it has, so nothing is held against it


def test_a_candidate_that_hangs_does_not_outlast_ctrl_c(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("tune_model.tune.workshop._GRACE_S", 1.0)
    device, shop = hanging(tmp_path, None)

    def interrupt() -> None:
        while not device._is_open:
            time.sleep(0.05)
        time.sleep(0.5)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt, daemon=True).start()
    tuning = tune_with(linear_plan(1), shop)
    assert (tuning.stopped, tuning.choices[0].status) == ("interrupted", "not searched")
    assert tuning.choices[0].rejections == ()
