"""New winners are measured again: what is only lucky, or wrong on other numbers, never ends in a choice."""

from pathlib import Path

import msgspec
import pytest
from tuning_fakes import TARGET, FakeFamily, RecordedDevice, linear_plan, without_times

from tune_model.runtime.program import Transpose
from tune_model.tune.candidate import Built, Candidate, Family, Rejected
from tune_model.tune.choice import Choice, Tuning
from tune_model.tune.device import Bench, Passed, Samples
from tune_model.tune.events import ChoiceConfirmed, Event
from tune_model.tune.families.aten import FAMILY as ATEN
from tune_model.tune.measuring.policy import Rung
from tune_model.tune.options import TuneOptions
from tune_model.tune.records.database import Confirmation, Finalist
from tune_model.tune.search.guard import judge
from tune_model.tune.tuner import tune_with
from tune_model.tune.workshop import Workshop

ONE = ((("n", 0),),)
FAMILIES: tuple[Family, ...] = (ATEN, *(FakeFamily(name, ONE) for name in ("planted", "second", "third")))
TIMES = {"aten": 10.0, "planted": 4.0, "second": 6.0, "third": 7.0}


class Fresh(RecordedDevice):
    """Other times, and other verdicts on values, once it was closed and opened again: a fresh process.

    Attributes:
        seeds: Of every task opened.
        processes: How many there were.
    """

    def __init__(self, later: dict[str, float], wrong_later: tuple[str, ...] = (), **options: bool) -> None:
        super().__init__(dict(TIMES))
        self.later = later
        self.wrong_later = wrong_later
        self.options = options
        self.seeds: list[int] = []
        self.processes = 1

    def open(self, bench: Bench) -> Passed | Rejected:
        self.seeds.append(bench.seed)
        if self.processes > 1 and self.options.get("fails"):
            return Rejected("crash", "the device process exited with 1 during open")
        return super().open(bench)

    def compare(self, candidates: tuple[tuple[Candidate, Built], ...], rung: Rung) -> tuple[Samples | Rejected, ...]:
        found = super().compare(candidates, rung)
        if self.processes > 1 and self.options.get("crowded"):
            return tuple(Samples(f.us, disturbed=True, doubtful=True) for f in found if isinstance(f, Samples))
        if self.processes > 1 and self.options.get("crashes"):
            return (found[0], *(Rejected("crash", "gone") for _ in found[1:]))
        return found

    def close(self) -> None:
        super().close()
        self.processes += 1
        self.times |= self.later
        self.wrong = (*self.wrong, *self.wrong_later)


class Runs:
    """Tunes over one records database."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.events: list[Event] = []

    def __call__(self, device: RecordedDevice, *sizes: int, **options) -> Tuning:  # type: ignore[no-untyped-def]
        self.events = []
        settings = TuneOptions(self.folder / "records.sqlite", self.folder / "kernels", **options)
        self.shop = Workshop(FAMILIES, TARGET, device, settings, self.events.append)
        return tune_with(linear_plan(*(sizes or (1,))), self.shop)

    def confirmed(self) -> list[ChoiceConfirmed]:
        return [event for event in self.events if isinstance(event, ChoiceConfirmed)]


@pytest.fixture
def runs(tmp_path: Path) -> Runs:
    return Runs(tmp_path)


def only(tuning: Tuning) -> Choice:
    (choice,) = tuning.choices
    return choice


def reasons(choice: Choice) -> dict[str, Rejected]:
    return {candidate.family: rejected for candidate, rejected in choice.rejections}


def nothing_is_measured_again(runs: Runs, before: Tuning) -> None:
    silent = RecordedDevice({})
    again = runs(silent)
    assert (again.builds, again.measured) == (0, 0)
    assert silent.asked == [("close", "")]
    assert without_times(again) == without_times(before)


def test_a_winner_that_holds_is_measured_once_more_in_a_fresh_process_on_other_inputs(runs: Runs):
    device = Fresh({})
    tuning = runs(device)
    choice = only(tuning)
    assert (choice.winner.family, choice.status) == ("planted", "tuned")
    assert device.processes == 3  # races, guard, and closed at the end
    first, second = device.seeds
    assert first != second
    after = device.asked[device.asked.index(("close", "")) :]
    assert [what for what, _ in after] == ["close", "open", "check", "compare", "close"]
    assert [m.candidate.family for m in choice.measurements if m.stage == "guard"] == ["aten", "planted"]
    assert [(e.candidate.family, e.held, e.detail) for e in runs.confirmed()] == [("planted", True, "")]
    nothing_is_measured_again(runs, tuning)


def test_what_is_reported_is_what_was_measured_again(runs: Runs):
    """The winner of a final is the luckiest too: 2.50x there, 2.44x in a second look."""
    choice = only(runs(Fresh({"planted": 4.1})))
    assert choice.winner.family == "planted"
    assert choice.median_us == pytest.approx(4.1, rel=0.01)
    assert choice.gain_low <= 10.0 / 4.1 <= choice.gain_high
    assert "planted" not in reasons(choice)


def test_a_planted_fast_but_wrong_candidate_never_ends_in_a_choice(runs: Runs):
    tuning = runs(Fresh({}, wrong_later=("planted",)))
    choice = only(tuning)
    assert (choice.winner.family, choice.status) == ("second", "tuned")
    assert reasons(choice)["planted"].reason == "wrong"
    assert "after it had won" in reasons(choice)["planted"].detail
    assert [(e.candidate.family, e.held) for e in runs.confirmed()] == [("planted", False), ("second", True)]
    nothing_is_measured_again(runs, tuning)
    assert only(runs(Fresh({}), recheck=True)).winner.family == "planted"


def test_a_planted_lucky_but_slow_candidate_never_ends_in_a_choice(runs: Runs):
    tuning = runs(Fresh({"planted": 11.0}))
    choice = only(tuning)
    assert (choice.winner.family, choice.status) == ("second", "tuned")
    assert reasons(choice)["planted"].reason == "guard"
    assert reasons(choice)["planted"].detail.startswith("0.91x")
    assert "2.50x" in reasons(choice)["planted"].detail
    nothing_is_measured_again(runs, tuning)


def test_one_that_is_less_fast_than_it_seemed_competes_with_what_it_showed(runs: Runs):
    assert only(runs(Fresh({"planted": 6.5}))).winner.family == "second"


def test_one_that_is_still_the_fastest_stays_and_tells_the_truth(runs: Runs):
    choice = only(runs(Fresh({"planted": 5.0})))
    assert (choice.winner.family, choice.status) == ("planted", "tuned")
    assert choice.baseline_us / choice.median_us == pytest.approx(2.0, rel=0.01)
    assert reasons(choice)["planted"].detail.startswith("2.00x")


def test_the_extern_takes_over_when_nothing_holds(runs: Runs):
    tuning = runs(Fresh({"planted": 12.0, "second": 12.0, "third": 12.0}))
    choice = only(tuning)
    assert (choice.winner.family, choice.status) == ("aten", "no gain")
    assert [e.held for e in runs.confirmed()] == [False, False, False]
    nothing_is_measured_again(runs, tuning)


def test_one_that_crashes_when_it_is_measured_again_is_out(runs: Runs):
    choice = only(runs(Fresh({}, crashes=True)))
    assert choice.winner.family == "aten"
    assert reasons(choice)["planted"].reason == "crash"


def test_one_that_crashes_once_when_it_is_measured_again_is_looked_at_twice(runs: Runs):
    """A failure in the second look is final, and a busy machine may have caused it."""

    class Once(Fresh):
        def check(self, candidate: Candidate, built: Built) -> Passed | Rejected:
            if self.processes > 1 and self.options.pop("once", False):
                return Rejected("timeout", "check took longer than 60 s")
            return super().check(candidate, built)

    tuning = runs(Once({}, once=True))
    assert (only(tuning).winner.family, only(tuning).status) == ("planted", "tuned")
    assert only(tuning).rejections == ()
    nothing_is_measured_again(runs, tuning)


def test_a_machine_that_is_never_calm_confirms_nothing(runs: Runs):
    tuning = runs(Fresh({}, crowded=True))
    choice = only(tuning)
    assert (choice.winner.family, choice.status) == ("aten", "disturbed")
    assert tuning.repeated == 3
    nothing_is_measured_again(runs, tuning)


def test_a_task_that_does_not_open_again_keeps_the_extern_and_is_tried_again(runs: Runs):
    choice = only(runs(Fresh({}, fails=True)))
    assert (choice.winner.family, choice.status) == ("aten", "unconfirmed")
    again = runs(Fresh({}))
    assert (only(again).winner.family, only(again).status) == ("planted", "tuned")
    assert again.measured == 2


def test_an_interrupted_run_ships_nothing_unconfirmed(runs: Runs):
    class Interrupts(Fresh):
        def close(self) -> None:
            runs.shop.stop.set()
            super().close()

    tuning = runs(Interrupts({}), 1, 8)
    assert tuning.stopped == "interrupted"
    # The one in flight is finished.
    assert sorted((c.winner.family, c.status) for c in tuning.choices) == [
        ("aten", "unconfirmed"),
        ("planted", "tuned"),
    ]
    rest = runs(Fresh({}), 1, 8)
    assert (rest.stopped, rest.measured) == ("", 2)
    assert [c.winner.family for c in rest.choices] == ["planted", "planted"]


def test_a_spent_budget_ships_nothing_unconfirmed(runs: Runs):
    class Late(Fresh):
        def close(self) -> None:
            runs.shop.budget.started -= 1000.0  # so long did starting the fresh process take
            super().close()

    tuning = runs(Late({}), 1, 8, budget_s=600.0)
    assert tuning.stopped == "budget"
    # The one in flight is finished.
    choices = sorted((c.winner.family, c.status) for c in tuning.choices)
    assert choices == [("aten", "unconfirmed"), ("planted", "tuned")]


def test_a_budget_that_is_overdrawn_at_once_confirms_nothing(runs: Runs):
    class Long(Fresh):
        def compare(self, candidates, rung):  # type: ignore[no-untyped-def]
            runs.shop.budget.started -= 1000.0
            return super().compare(candidates, rung)

    tuning = runs(Long({}), budget_s=600.0)
    assert tuning.stopped == "budget"
    assert tuning.stopped == "budget"
    assert (only(tuning).winner.family, only(tuning).status) == ("aten", "unconfirmed")


def test_a_layout_that_does_not_hold_is_given_up_for_all_its_readers(tmp_path: Path):
    """A weight is laid out for the sum of its readers; one that lied about its time changes the sum."""
    families = (ATEN, FakeFamily("planted", ONE, layout="transposed"))

    def run(device: RecordedDevice, folder: Path) -> Tuning:
        settings = TuneOptions(folder / "records.sqlite", folder / "kernels")
        return tune_with(linear_plan(1, 8), Workshop(families, TARGET, device, settings, lambda _event: None))

    tuning = run(Fresh({"planted": 9.95}), tmp_path / "lied")
    assert [choice.winner.family for choice in tuning.choices] == ["aten", "aten"]
    assert tuning.plan.programs[0].weights[0].transforms == ()
    tuning = run(Fresh({}), tmp_path / "held")
    assert tuning.plan.programs[0].weights[0].transforms == (Transpose(),)


EXTERN = Finalist(Candidate("aten"), (), 10.0, 1.0, 1.0, 1.0, 1, unconditional=True)


def finalist(gain: float, low: float, high: float) -> Finalist:
    return Finalist(Candidate("a"), (), 10.0 / gain, gain, low, high, 1, unconditional=True)


def shown(gain: float, low: float, high: float) -> Confirmation:
    return Confirmation(Candidate("a"), 5.0 / gain, 5.0, gain, low, high)


HOLDS = [
    (finalist(2.0, 1.9, 2.1), shown(2.0, 1.9, 2.1)),
    (finalist(2.0, 1.9, 2.1), shown(3.0, 2.9, 3.1)),
    (finalist(2.0, 1.9, 2.1), shown(1.85, 1.80, 1.88)),
    (finalist(0.9, 0.85, 0.95), shown(0.88, 0.84, 0.92)),  # chosen for a layout
]
LIES = [
    (finalist(2.0, 1.9, 2.1), shown(1.5, 1.4, 1.6)),
    (finalist(1.02, 1.01, 1.03), shown(1.01, 0.99, 1.03)),
    (finalist(0.9, 0.85, 0.95), shown(0.5, 0.45, 0.55)),
]


@pytest.mark.parametrize(("before", "now"), HOLDS)
def test_what_holds_stays_as_it_is(before: Finalist, now: Confirmation):
    assert judge(before, now, EXTERN) is before


@pytest.mark.parametrize(("before", "now"), LIES)
def test_what_does_not_hold_is_worth_what_it_showed(before: Finalist, now: Confirmation):
    verdict = judge(before, now, EXTERN)
    assert isinstance(verdict, Finalist)
    assert (verdict.gain, verdict.gain_low, verdict.gain_high) == (now.gain, now.gain_low, now.gain_high)
    assert verdict.median_us == pytest.approx(10.0 / now.gain)  # not the other session's 5 us


def test_what_fails_or_is_disturbed_is_out():
    for found in (msgspec.structs.replace(HOLDS[0][1], doubtful=True), Confirmation(Candidate("a"), failed="wrong: x")):
        assert isinstance(judge(HOLDS[0][0], found, EXTERN), Rejected)
