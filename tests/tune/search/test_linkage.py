"""How kernels start, decided by the step: by times that a fake timer makes up."""

from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
import pytest
from tuning_fakes import TARGET, FakeFamily, RecordedDevice, linear_plan, without_times

from tune_model.extract.task import Plan, Site
from tune_model.tune.candidate import Config, Rejected
from tune_model.tune.choice import Choice, Tuning
from tune_model.tune.device import Samples
from tune_model.tune.events import Event, StepTurned
from tune_model.tune.families.aten import FAMILY as ATEN
from tune_model.tune.measuring.step_bench import Work
from tune_model.tune.options import TuneOptions
from tune_model.tune.tuner import tune_with
from tune_model.tune.workshop import Workshop

ALONE = {"aten": 20.0, "fast": 5.0}
"""A dependent launch takes a microsecond more alone, and asking ahead another one (`RecordedDevice`)."""


def forms(*tiles: int) -> tuple[Config, ...]:
    launches = ((False, False), (True, False), (True, True))
    return tuple((("tile", tile), ("pdl", pdl), ("prefetch", ask)) for tile in tiles for pdl, ask in launches)


def text(*, pdl: bool, prefetch: bool = False, tile: int = 0) -> str:
    return f"fast(tile={tile}, pdl={pdl}, prefetch={prefetch})"


PLAIN, DEPENDENT, ASKING = text(pdl=False), text(pdl=True), text(pdl=True, prefetch=True)


class Steps:
    """A timer whose step takes what `whole` says of the labels of its kernels.

    Attributes:
        asked: Labels by variant, for every message.
    """

    def __init__(
        self, whole: Callable[[Sequence[str]], float], *, disturbed: bool = False, wobble: float = 0.0
    ) -> None:
        self.whole = whole
        self.disturbed = disturbed
        self.wobble = wobble
        self.asked: list[list[tuple[str, ...]]] = []

    def compare(self, work: Work) -> tuple[Samples, ...] | Rejected:
        variants = [tuple(e.candidate for entries in v.entries.values() for e in entries) for v in work.variants]
        self.asked.append(variants)
        return tuple(Samples(self._times(variant, place), self.disturbed) for place, variant in enumerate(variants))

    def _times(self, variant: Sequence[str], place: int) -> tuple[float, ...]:
        """Rounds in which this variant is now faster, now slower, by the wobble."""
        signs = [(-1.0) ** (number + place) for number in range(20)]
        return tuple(self.whole(variant) * (1.0 + self.wobble * sign) for sign in signs)

    def close(self) -> None:
        pass


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
    folder: Path, steps: Steps, runs: tuple[int, ...] = (4,), alone: dict[str, float] | None = None, wrong: tuple = ()
) -> tuple[Tuning, list[Event]]:
    events: list[Event] = []
    families = (ATEN, FakeFamily("fast", forms(0)))
    options = TuneOptions(folder / "records.sqlite", folder / "kernels")
    shop = Workshop(families, TARGET, RecordedDevice(alone or ALONE, wrong), options, events.append)
    return tune_with(plan_of(*runs), shop, steps), events


def launches(tuning: Tuning) -> list[str]:
    return [", ".join(f"{k}={v}" for k, v in choice.winner.config if k != "tile") for choice in tuning.choices]


def one(tuning: Tuning) -> Choice:
    (choice,) = tuning.choices
    return choice


def test_a_form_that_is_slower_alone_wins_where_the_step_is_faster_with_it(tmp_path: Path):
    steps = Steps(lambda kernels: {PLAIN: 100.0, DEPENDENT: 98.0, ASKING: 97.0}.get(kernels[0], 200.0))
    tuning, events = tuned(tmp_path, steps)
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
    (turned,) = [event for event in events if isinstance(event, StepTurned)]
    assert (turned.step, turned.tasks) == ("forward batch=1", (choice.task,))
    assert (turned.median_us, turned.baseline_us) == (pytest.approx(97.0), pytest.approx(100.0))
    (step,) = tuning.steps
    assert (step.median_us, step.baseline_us) == (pytest.approx(97.0), pytest.approx(200.0))


def test_the_winner_of_the_race_stays_where_the_step_does_not_mind(tmp_path: Path):
    tuning, events = tuned(tmp_path, Steps(lambda kernels: 200.0 if kernels == ("aten",) else 100.0))
    assert launches(tuning) == ["pdl=False, prefetch=False"]
    assert one(tuning).rejections == ()
    assert not [event for event in events if isinstance(event, StepTurned)]


def test_what_is_within_the_noise_is_no_gain(tmp_path: Path):
    steps = Steps(lambda k: {PLAIN: 100.0, DEPENDENT: 99.9, ASKING: 99.9}.get(k[0], 200.0), wobble=0.01)
    assert launches(tuned(tmp_path, steps)[0]) == ["pdl=False, prefetch=False"]


def test_disturbed_times_decide_nothing(tmp_path: Path):
    steps = Steps(lambda k: {PLAIN: 100.0, DEPENDENT: 98.0, ASKING: 97.0}.get(k[0], 200.0))
    doubtful = lambda work: tuple(  # noqa: E731
        Samples(s.us, disturbed=True, doubtful=True) for s in Steps.compare(steps, work)
    )
    steps.compare = doubtful  # type: ignore[method-assign, assignment]
    assert launches(tuned(tmp_path, steps)[0]) == ["pdl=False, prefetch=False"]


def crossing(kernels: Sequence[str]) -> float:
    """Each of two kernels gains by a dependent launch, and both together lose."""
    if "aten" in kernels:
        return 300.0
    dependent = [kernel != PLAIN for kernel in kernels]
    return {(False, False): 100.0, (True, False): 96.0, (False, True): 98.0, (True, True): 103.0}[tuple(dependent)]


def test_of_gains_that_get_into_each_others_way_the_larger_stays(tmp_path: Path):
    tuning, _ = tuned(tmp_path, Steps(crossing), runs=(4, 4))
    first, second = (("pdl", True) in choice.winner.config for choice in tuning.choices)
    assert (first, second) == (True, False)


def test_gains_that_add_up_are_all_taken(tmp_path: Path):
    def whole(kernels: Sequence[str]) -> float:
        return 300.0 if "aten" in kernels else 100.0 - 2.0 * sum(kernel == DEPENDENT for kernel in kernels)

    tuning, events = tuned(tmp_path, Steps(whole), runs=(4, 4))
    assert launches(tuning) == ["pdl=True, prefetch=False"] * 2
    (turned,) = [event for event in events if isinstance(event, StepTurned)]
    assert len(turned.tasks) == 2


def test_kernels_that_run_too_rarely_or_too_long_are_not_asked_about(tmp_path: Path):
    def whole(kernels: Sequence[str]) -> float:
        return 9e6 if "aten" in kernels else 100.0 - 2.0 * sum(kernel == DEPENDENT for kernel in kernels)

    rare = Steps(whole)
    tuned(tmp_path / "rare", rare, runs=(1, 10000))
    turned = {variant for variants in rare.asked for variant in variants}
    assert (DEPENDENT, PLAIN) not in turned
    assert (PLAIN, DEPENDENT) in turned
    long = Steps(whole)
    tuned(tmp_path / "long", long, alone={"aten": 1000.0, "fast": 500.0})
    assert {variant for variants in long.asked for variant in variants} == {("aten",), (PLAIN,)}


def test_a_form_that_is_not_faster_than_the_extern_gives_way_to_the_winner(tmp_path: Path):
    steps = Steps(lambda kernels: {PLAIN: 100.0, DEPENDENT: 98.0, ASKING: 97.0}.get(kernels[0], 200.0))
    tuning, _ = tuned(tmp_path, steps, alone={"aten": 6.5, "fast": 5.0})
    assert launches(tuning) == ["pdl=False, prefetch=False"]
    assert one(tuning).status == "tuned"
    assert not [r for _, r in one(tuning).rejections if r.reason == "step"]


def test_a_second_run_measures_nothing_and_decides_the_same(tmp_path: Path):
    times = {PLAIN: 100.0, DEPENDENT: 98.0, ASKING: 97.0}
    first, _ = tuned(tmp_path, Steps(lambda kernels: times.get(kernels[0], 200.0)))
    silent = Steps(lambda _kernels: 1.0)
    again, _ = tuned(tmp_path, silent)
    assert (again.builds, again.measured, silent.asked) == (0, 0, [])
    assert without_times(again) == without_times(first)


def test_many_forms_are_timed_a_few_at_a_time(tmp_path: Path):
    steps = Steps(lambda kernels: 300.0 if "aten" in kernels else 100.0)
    tuned(tmp_path, steps, runs=(9,) * 7)
    assert max(len(variants) for variants in steps.asked) == 8
    singles = [variants for variants in steps.asked if len(variants) > 2]
    assert sum(len(variants) - 1 for variants in singles) == 14
    assert {variants[0] for variants in singles} == {(PLAIN,) * 7}
