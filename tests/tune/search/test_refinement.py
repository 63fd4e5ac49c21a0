"""After a race on a GPU the best of each list climbs through the family's whole space."""

from pathlib import Path

import pytest
from tuning_fakes import FakeFamily, RecordedDevice, Wide, linear_plan, without_times

from tune_model.tune.building.pool import Job
from tune_model.tune.candidate import Candidate, Effort
from tune_model.tune.choice import Choice
from tune_model.tune.families.aten import FAMILY as ATEN
from tune_model.tune.machine.cuda import offline_cuda
from tune_model.tune.options import TuneOptions
from tune_model.tune.tuner import tune_with
from tune_model.tune.workshop import Workshop

SPACE = tuple((("a", a), ("b", b)) for a in range(6) for b in range(6))
"""A recorded device adds the parameters to a family's time, so (0, 0) is the fastest."""


class Runs:
    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __call__(self, families: tuple[FakeFamily, ...], times: dict[str, float], **options):
        settings = TuneOptions(self.folder / "records.sqlite", self.folder / "kernels", **options)
        device = RecordedDevice({"aten": 100.0} | times)
        shop = Workshop((ATEN, *families), offline_cuda(90), device, settings, lambda _event: None)
        return tune_with(linear_plan(1), shop)


@pytest.fixture
def runs(tmp_path: Path) -> Runs:
    return Runs(tmp_path)


def only(tuning) -> Choice:
    (choice,) = tuning.choices
    return choice


def test_the_best_of_the_list_climbs_to_the_best_of_the_space(runs: Runs):
    first = runs((Wide("wide", SPACE),), {"wide": 50.0})
    choice = only(first)
    assert choice.winner == Candidate("wide", (("a", 0), ("b", 0)))
    (trail,) = choice.trails
    assert trail.footprints[0].at.config == (("a", 5), ("b", 4))
    assert len({m.candidate for m in choice.measurements if m.candidate.family == "wide"}) < len(SPACE)

    again = runs((Wide("wide", SPACE),), {"wide": 50.0})
    assert (again.builds, again.measured) == (0, 0)
    assert without_times(again) == without_times(first)


def test_a_quick_search_and_a_family_that_is_far_behind_do_not_climb(runs: Runs):
    listed = Candidate("wide", (("a", 5), ("b", 4)))
    assert only(runs((Wide("wide", SPACE),), {"wide": 50.0}, effort=Effort.QUICK)).winner == listed
    fast = FakeFamily("fast", ((("n", 0),),))
    choice = only(runs((fast, Wide("wide", SPACE)), {"wide": 50.0, "fast": 40.0}))
    assert choice.winner.family == "fast"
    assert choice.trails == ()


def test_the_climbs_of_a_balanced_search_end_before_they_are_over(runs: Runs):
    """Builds are what a search on a GPU waits for: a long climb would cost as much as the race before it."""
    far = tuple((("a", a), ("b", b)) for a in range(30) for b in range(30))
    choice = only(runs((Wide("wide", far),), {"wide": 1.0}))
    (trail,) = choice.trails
    asked = [trail.footprints[0].at.config, *(tried.config for step in trail.footprints for tried in step.tried)]
    assert len(asked) == 24
    best = min(asked, key=lambda config: sum(int(value) for _, value in config))
    assert choice.winner == Candidate("wide", best)
    assert dict(best) != {"a": 0, "b": 0}


def test_a_neighbourhood_is_built_before_the_races_to_come(tmp_path: Path):
    """Each of its builds was once waited for alone, behind the queue of all other tasks."""
    shop = Workshop(
        (ATEN, Wide("wide", SPACE)),
        offline_cuda(90),
        RecordedDevice({"aten": 100.0, "wide": 50.0}),
        TuneOptions(tmp_path / "records.sqlite", tmp_path / "kernels"),
        lambda _event: None,
    )
    submitted: list[tuple[str, bool]] = []
    submit = shop.pool.submit

    def note(job: Job, *, urgent: bool = False) -> int:
        submitted.append((str(job.config), urgent))
        return submit(job, urgent=urgent)

    shop.pool.submit = note  # type: ignore[method-assign]
    tune_with(linear_plan(1), shop)
    listed = {str(config) for config in SPACE[:-3:-1]}
    assert {config for config, urgent in submitted if not urgent} == listed
    assert len([config for config, urgent in submitted if urgent]) > 4
