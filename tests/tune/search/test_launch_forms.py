"""How kernels start, decided by the step: by times that a fake timer makes up."""

from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
import pytest
from tuning_fakes import TARGET, FakeFamily, RecordedDevice, linear_plan, without_times

from tune_model.extract.task import Plan, Site
from tune_model.tune.building.builds import Builds
from tune_model.tune.candidate import Built, Candidate, Config, Rejected, label
from tune_model.tune.choice import Choice, Tuning
from tune_model.tune.device import Passed, Samples
from tune_model.tune.events import Event, StepTurned
from tune_model.tune.families.aten import FAMILY as ATEN
from tune_model.tune.measuring.step_bench import Work
from tune_model.tune.options import TuneOptions
from tune_model.tune.records.database import Records
from tune_model.tune.records.facts import StepTiming
from tune_model.tune.search.steps import Steps as TimedSteps
from tune_model.tune.tuner import tune_with
from tune_model.tune.workshop import AbandonedRaceError, InterruptedRaceError, Workshop

ALONE = {"aten": 20.0, "fast": 5.0}
"""A dependent launch takes a microsecond more alone, and asking ahead another one (`RecordedDevice`)."""


FORMS: tuple[Config, ...] = tuple(
    (("tile", 0), ("pdl", pdl), ("prefetch", ask)) for pdl, ask in ((False, False), (True, False), (True, True))
)
PLAIN, DEPENDENT, ASKING = (label(Candidate("fast", form)) for form in FORMS)


class Clock:
    """A timer whose step takes what `whole` says of the labels of its kernels.

    Attributes:
        asked: Labels by variant, for every message.
        before: Called with the number of each message.
    """

    def __init__(
        self,
        whole: Callable[[Sequence[str]], float],
        *,
        doubtful: bool = False,
        wobble: float = 0.0,
        crashes: str = "",
        before: Callable[[int], None] = lambda _: None,
    ) -> None:
        self.whole = whole
        self.doubtful = doubtful
        self.wobble = wobble
        self.crashes = crashes
        self.before = before
        self.asked: list[list[tuple[str, ...]]] = []

    def compare(self, work: Work) -> tuple[Samples, ...] | Rejected:
        self.before(len(self.asked))
        variants = [tuple(e.candidate for entries in v.entries.values() for e in entries) for v in work.variants]
        self.asked.append(variants)
        if any(self.crashes in variant for variant in variants):
            return Rejected("crash", "the process is gone")
        flags = self.doubtful, self.doubtful
        return tuple(Samples(self._times(variant, place), *flags) for place, variant in enumerate(variants))

    def _times(self, variant: Sequence[str], place: int) -> tuple[float, ...]:
        """Rounds in which this variant is now faster, now slower, by the wobble."""
        signs = [(-1.0) ** (number + place) for number in range(20)]
        return tuple(self.whole(variant) * (1.0 + self.wobble * sign) for sign in signs)

    def close(self) -> None:
        pass


class Picky(RecordedDevice):
    """A device on which some forms are wrong on the guard's inputs."""

    def __init__(self, times: dict[str, float], wrong_later: Sequence[str]) -> None:
        super().__init__(times)
        self.wrong_later = wrong_later

    def check(self, candidate: Candidate, built: Built) -> Passed | Rejected:
        opened = [message for message in self.asked if message[0] == "open"]
        again = opened.count(opened[-1]) > 1
        return Rejected("wrong", "error 0.5") if again and label(candidate) in self.wrong_later else Passed(0.001)


def plan_of(*runs: int) -> Plan:
    """One point of a grid at which task number `i` runs `runs[i]` times."""
    plan = linear_plan(*(8**place for place in range(len(runs))))
    tasks = []
    for task, count in zip(plan.tasks, runs, strict=True):
        (site,) = task.sites
        here = Site(site.program, (("batch", 1),), site.form, site.dims, count)
        tasks.append(msgspec.structs.replace(task, sites=(here,)))
    return msgspec.structs.replace(plan, tasks=tuple(tasks))


def tuned(
    folder: Path,
    clock: Clock,
    runs: tuple[int, ...] = (4,),
    device: RecordedDevice | None = None,
    plan: Plan | None = None,
    shops: list[Workshop] | None = None,
) -> tuple[Tuning, list[Event]]:
    events: list[Event] = []
    families = (ATEN, FakeFamily("fast", FORMS))
    options = TuneOptions(folder / "records.sqlite", folder / "kernels")
    shop = Workshop(families, TARGET, device or RecordedDevice(ALONE), options, events.append)
    if shops is not None:
        shops.append(shop)
    return tune_with(plan or plan_of(*runs), shop, clock), events


def turns(events: Sequence[Event]) -> list[StepTurned]:
    return [event for event in events if isinstance(event, StepTurned)]


def of_one(kernels: Sequence[str]) -> float:
    """A step with one kernel: the better it is overlapped the faster."""
    return {PLAIN: 100.0, DEPENDENT: 98.0, ASKING: 97.0}.get(kernels[0], 200.0)


def launches(tuning: Tuning) -> list[str]:
    return [", ".join(f"{k}={v}" for k, v in choice.winner.config if k != "tile") for choice in tuning.choices]


def one(tuning: Tuning) -> Choice:
    (choice,) = tuning.choices
    return choice


def test_all_rows_are_kept_with_a_task_of_the_model(tmp_path: Path):
    """`records prune --keep` took whole steps for tasks of other models."""
    tuning, _ = tuned(tmp_path, Clock(of_one))
    records = Records(tmp_path / "records.sqlite")
    rows = list(records.rows())
    records.close()
    assert any(isinstance(row.body, StepTiming) for row in rows)
    assert {row.task for row in rows} == {task.key for task in tuning.plan.tasks}


def test_a_step_that_cannot_be_timed_with_its_new_forms_has_no_time(tmp_path: Path):
    """It kept that of the forms before."""

    class Fails(Clock):
        def compare(self, work: Work) -> tuple[Samples, ...] | Rejected:
            labels = {e.candidate for v in work.variants for entries in v.entries.values() for e in entries}
            return Rejected("crash", "gone") if {"aten", ASKING} <= labels else super().compare(work)

    tuning, _ = tuned(tmp_path, Fails(of_one))
    assert launches(tuning) == ["pdl=True, prefetch=True"]
    assert tuning.steps == ()


def test_a_form_that_is_slower_alone_wins_where_the_step_is_faster_with_it(tmp_path: Path):
    clock = Clock(of_one)
    tuning, events = tuned(tmp_path, clock)
    assert launches(tuning) == ["pdl=True, prefetch=True"]
    choice = one(tuning)
    assert (choice.status, choice.median_us) == (
        "tuned",
        pytest.approx(7.0, rel=0.01),
    )  # its own time, not the winner's
    assert choice.baseline_us == pytest.approx(20.0, rel=0.01)
    ((_, rejected),) = [(c, r) for c, r in choice.rejections if c.family == "fast"]
    assert rejected.reason == "step"
    assert "1.031x as fast with pdl=True, prefetch=True of fast(tile=0, pdl=False, prefetch=False)" in rejected.detail
    (turned,) = turns(events)
    assert (turned.step, turned.tasks) == ("forward batch=1", (choice.task,))
    assert (turned.median_us, turned.baseline_us) == (pytest.approx(97.0), pytest.approx(100.0))
    (step,) = tuning.steps
    assert (step.median_us, step.baseline_us) == (pytest.approx(97.0), pytest.approx(200.0))


def test_the_winner_of_the_race_stays_where_the_step_does_not_mind(tmp_path: Path):
    tuning, events = tuned(tmp_path, Clock(lambda kernels: 200.0 if kernels == ("aten",) else 100.0))
    assert launches(tuning) == ["pdl=False, prefetch=False"]
    assert one(tuning).rejections == ()
    assert not turns(events)


def test_what_is_within_the_noise_is_no_gain(tmp_path: Path):
    clock = Clock(lambda k: {PLAIN: 100.0, DEPENDENT: 99.9, ASKING: 99.9}.get(k[0], 200.0), wobble=0.01)
    assert launches(tuned(tmp_path, clock)[0]) == ["pdl=False, prefetch=False"]


def test_times_that_others_disturbed_decide_nothing(tmp_path: Path):
    assert launches(tuned(tmp_path, Clock(of_one, doubtful=True))[0]) == ["pdl=False, prefetch=False"]


def crossing(kernels: Sequence[str]) -> float:
    """Each of two kernels gains by a dependent launch, and both together lose."""
    if "aten" in kernels:
        return 300.0
    dependent = [kernel != PLAIN for kernel in kernels]
    return {(False, False): 100.0, (True, False): 96.0, (False, True): 98.0, (True, True): 103.0}[tuple(dependent)]


def test_of_gains_that_get_into_each_others_way_the_larger_stays(tmp_path: Path):
    tuning, _ = tuned(tmp_path, Clock(crossing), runs=(4, 4))
    first, second = (("pdl", True) in choice.winner.config for choice in tuning.choices)
    assert (first, second) == (True, False)


def test_gains_that_add_up_are_all_taken(tmp_path: Path):
    def whole(kernels: Sequence[str]) -> float:
        return 300.0 if "aten" in kernels else 100.0 - 2.0 * sum(kernel == DEPENDENT for kernel in kernels)

    tuning, events = tuned(tmp_path, Clock(whole), runs=(4, 4))
    assert launches(tuning) == ["pdl=True, prefetch=False"] * 2
    (turned,) = turns(events)
    assert len(turned.tasks) == 2


def test_kernels_that_run_too_rarely_or_too_long_are_not_asked_about(tmp_path: Path):
    def whole(kernels: Sequence[str]) -> float:
        return 9e6 if "aten" in kernels else 100.0 - 2.0 * sum(kernel == DEPENDENT for kernel in kernels)

    rare = Clock(whole)
    tuned(tmp_path / "rare", rare, runs=(1, 10000))
    turned = {variant for variants in rare.asked for variant in variants}
    assert (DEPENDENT, PLAIN) not in turned
    assert (PLAIN, DEPENDENT) in turned
    long = Clock(whole)
    tuned(tmp_path / "long", long, device=RecordedDevice({"aten": 1000.0, "fast": 500.0}))
    assert {variant for variants in long.asked for variant in variants} == {("aten",), (PLAIN,)}


def test_the_fastest_set_is_taken_and_not_the_largest(tmp_path: Path):
    def whole(kernels: Sequence[str]) -> float:
        if "aten" in kernels:
            return 300.0
        dependent = tuple(kernel != PLAIN for kernel in kernels)
        return {(False, False): 100.0, (True, False): 96.0, (False, True): 98.0, (True, True): 97.0}[dependent]

    tuning, events = tuned(tmp_path, Clock(whole), runs=(4, 4))
    first, second = (("pdl", True) in choice.winner.config for choice in tuning.choices)
    assert (first, second) == (True, False)
    assert [turned.gain for turned in turns(events)] == [pytest.approx(100 / 96)]


def test_tasks_that_occur_at_several_points_are_left_alone(tmp_path: Path):
    plan = plan_of(4)
    (task,) = plan.tasks
    (site,) = task.sites
    sites = (site, msgspec.structs.replace(site, point=(("batch", 2),)))
    twice = msgspec.structs.replace(plan, tasks=(msgspec.structs.replace(task, sites=sites),))
    assert launches(tuned(tmp_path, Clock(of_one), plan=twice)[0]) == ["pdl=False, prefetch=False"]


def test_a_model_that_does_not_fit_twice_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(TimedSteps, "fits", lambda _self, _plan: False)
    clock = Clock(of_one)
    assert launches(tuned(tmp_path, clock)[0]) == ["pdl=False, prefetch=False"]
    assert clock.asked == []


@pytest.mark.parametrize(
    ("alone", "wrong", "launch", "step_us"),
    [
        ({"aten": 20.0, "fast": 5.0}, [ASKING], "pdl=True, prefetch=False", 98.0),
        ({"aten": 20.0, "fast": 5.0}, [ASKING, DEPENDENT], "pdl=False, prefetch=False", 100.0),
        ({"aten": 6.5, "fast": 5.0}, [], "pdl=True, prefetch=False", 98.0),
        ({"aten": 5.8, "fast": 5.0}, [], "pdl=False, prefetch=False", 100.0),
    ],
    ids=["one is wrong", "both are wrong", "one is slower than the extern", "both are slower than the extern"],
)
def test_a_form_that_does_not_hold_beside_the_extern_gives_way(
    tmp_path: Path, alone: dict[str, float], wrong: list[str], launch: str, step_us: float
):
    tuning, events = tuned(tmp_path, Clock(of_one), device=Picky(alone, wrong))
    choice = one(tuning)
    assert (launches(tuning), choice.status) == ([launch], "tuned")
    assert [step.median_us for step in tuning.steps] == [pytest.approx(step_us)]
    assert [turned.median_us for turned in turns(events)] == ([98.0] if "True" in launch else [])
    assert len([r for _, r in choice.rejections if r.reason == "step"]) == ("True" in launch)
    assert len([r for _, r in choice.rejections if r.reason == "wrong"]) == len(wrong)
    silent = Clock(lambda _kernels: 1.0)
    again, _ = tuned(tmp_path, silent, device=Picky(alone, wrong))
    assert (again.builds, again.measured, silent.asked) == (0, 0, [])
    assert without_times(again) == without_times(tuning)


def test_a_second_run_measures_nothing_and_decides_the_same(tmp_path: Path):
    first, _ = tuned(tmp_path, Clock(of_one))
    silent = Clock(lambda _kernels: 1.0)
    again, _ = tuned(tmp_path, silent)
    assert (again.builds, again.measured, silent.asked) == (0, 0, [])
    assert without_times(again) == without_times(first)


@pytest.mark.parametrize("message", range(4))
def test_a_run_that_is_stopped_says_so_and_goes_on(tmp_path: Path, message: int):
    """While the step, the forms, the sets, the forms that are taken are timed."""
    whole, _ = tuned(tmp_path / "whole", Clock(of_one))
    shops: list[Workshop] = []

    def stop(number: int) -> None:
        if number == message:
            shops[0].stop.set()

    part, _ = tuned(tmp_path / "part", Clock(of_one, before=stop), shops=shops)
    assert part.stopped == ("interrupted" if message < 3 else "")
    assert len(part.steps) == 1
    rest, _ = tuned(tmp_path / "part", Clock(of_one))
    assert without_times(rest) == without_times(whole)


@pytest.mark.parametrize("error", [InterruptedRaceError, AbandonedRaceError])
def test_a_run_that_ends_within_a_build_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: type[Exception]
):
    obtain, asked = Builds.obtain, []

    def ended(builds: Builds, candidate: Candidate) -> Built | Rejected:
        if label(candidate) == ASKING and not asked:
            asked.append(candidate)
            raise error
        return obtain(builds, candidate)

    clock = Clock(of_one, before=lambda _: monkeypatch.setattr(Builds, "obtain", ended))
    tuning, _ = tuned(tmp_path, clock)
    assert asked
    assert (launches(tuning), tuning.stopped) == (["pdl=True, prefetch=False"], "budget")


def test_a_form_that_ends_the_process_costs_itself_only(tmp_path: Path):
    clock = Clock(of_one, crashes=ASKING)
    tuning, _ = tuned(tmp_path, clock)
    assert launches(tuning) == ["pdl=True, prefetch=False"]


def test_many_forms_are_timed_a_few_at_a_time(tmp_path: Path):
    clock = Clock(lambda kernels: 300.0 if "aten" in kernels else 100.0)
    tuned(tmp_path, clock, runs=(9,) * 7)
    assert max(len(variants) for variants in clock.asked) == 8
    singles = [variants for variants in clock.asked if len(variants) > 2]
    assert sum(len(variants) - 1 for variants in singles) == 14
    assert {variants[0] for variants in singles} == {(PLAIN,) * 7}
