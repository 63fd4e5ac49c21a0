"""After a race on a GPU the best of each list climbs through the family's whole space."""

from pathlib import Path

import pytest
from tuning_fakes import FakeFamily, RecordedDevice, Wide, linear_plan, without_times

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
