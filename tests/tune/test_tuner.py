import json
from pathlib import Path

import msgspec
import pytest
from tuning_fakes import (
    TARGET,
    FakeClock,
    FakeFamily,
    Moody,
    RecordedDevice,
    Refusing,
    linear_form,
    linear_plan,
    without_times,
)

from tune_model.runtime.program import Transpose, fingerprint
from tune_model.tune.candidate import Candidate, Family, Rejected
from tune_model.tune.choice import Tuning
from tune_model.tune.device import Samples
from tune_model.tune.events import (
    CandidateDone,
    ChoiceConfirmed,
    Event,
    TaskDone,
    TaskStarted,
    TuneFinished,
    TuneStarted,
)
from tune_model.tune.families.aten import FAMILY as ATEN
from tune_model.tune.options import TuneOptions
from tune_model.tune.tuner import tune_with
from tune_model.tune.workshop import Workshop

CONFIGS = tuple((("n", n),) for n in range(6))
SLOW_AND_FAST: tuple[Family, ...] = (ATEN, FakeFamily("slow", CONFIGS[:2]), FakeFamily("fast", CONFIGS))


class Runs:
    """Tunes over one records database and store."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.events: list[Event] = []

    def __call__(
        self,
        device: RecordedDevice,
        families: tuple[Family, ...] = SLOW_AND_FAST,
        sizes: tuple[int, ...] = (1, 8),
        **options,
    ) -> Tuning:
        settings = TuneOptions(self.folder / "records.sqlite", self.folder / "kernels", **options)
        self.events = []
        self.shop = Workshop(families, TARGET, device, settings, self.take)
        return tune_with(linear_plan(*sizes), self.shop)

    def take(self, event: Event) -> None:
        self.events.append(event)


@pytest.fixture
def runs(tmp_path: Path) -> Runs:
    return Runs(tmp_path)


def device(**changes: float) -> RecordedDevice:
    return RecordedDevice({"aten": 10.0, "slow": 12.0, "fast": 5.0} | changes)


def test_the_fastest_wins_and_the_numbers_are_those_of_the_final(runs: Runs):
    tuning = runs(device())
    assert [c.winner for c in tuning.choices] == [Candidate("fast", (("n", 0),))] * 2
    choice = tuning.choices[0]
    assert choice.status == "tuned"
    assert choice.baseline_us / choice.median_us == pytest.approx(2.0)
    assert choice.gain_low <= 2.0 <= choice.gain_high
    finals = [m.candidate.family for m in choice.measurements if m.stage == "final"]
    assert finals[0] == "aten"
    assert "fast" in finals
    timed = {m.candidate for m in choice.measurements}
    assert len(timed) == 1 + 2 + 6
    assert tuning.builds == 8 * 2
    assert tuning.measured == sum(len(c.measurements) for c in tuning.choices)
    assert list(tuning.code) == sorted(tuning.code)
    assert len(tuning.code) == 1


def test_the_extern_stays_unless_beaten(runs: Runs):
    tuning = runs(device(fast=10.0))
    assert [c.winner.family for c in tuning.choices] == ["aten", "aten"]
    assert [c.status for c in tuning.choices] == ["no gain", "no gain"]
    assert tuning.choices[0].median_us == tuning.choices[0].baseline_us


def test_a_second_run_builds_and_measures_nothing_and_gives_the_same_bytes(runs: Runs):
    first = runs(device())
    silent = RecordedDevice({})
    second = runs(silent)
    assert (second.builds, second.measured) == (0, 0)
    assert silent.asked == [("close", "")]
    assert without_times(second) == without_times(first)
    assert [e.replayed for e in runs.events if isinstance(e, TaskDone)] == [True, True]


def test_a_lost_kernel_store_costs_the_winners_builds_only(runs: Runs, tmp_path: Path):
    first = runs(device())
    (tmp_path / "kernels").rename(tmp_path / "elsewhere")
    second = runs(RecordedDevice({}))
    assert (second.builds, second.measured) == (2, 0)
    assert without_times(second) == without_times(first)


def test_a_new_candidate_is_measured_alone_with_the_finalists(runs: Runs):
    runs(device(), families=SLOW_AND_FAST)
    again = device(new=4.0)
    tuning = runs(again, families=(*SLOW_AND_FAST, FakeFamily("new", ((),))), sizes=(1,))
    assert next(name for kind, name in again.asked if kind == "time") == "new"
    assert {name for kind, name in again.asked if kind == "time"} <= {"new", "fast"}
    assert tuning.builds == 1
    assert tuning.choices[0].winner.family == "new"


def test_recheck_measures_again(runs: Runs):
    runs(device(), sizes=(1,))
    slower = device(fast=20.0)
    tuning = runs(slower, sizes=(1,), recheck=True)
    assert tuning.choices[0].winner.family == "aten"
    assert tuning.builds == 0
    assert tuning.measured > 9
    assert runs(RecordedDevice({}), sizes=(1,)).choices[0].winner.family == "aten"


def test_a_wrong_candidate_never_wins_and_its_reason_is_kept(runs: Runs):
    wrong = RecordedDevice({"aten": 10.0, "slow": 12.0, "fast": 5.0}, wrong=("fast",))
    tuning = runs(wrong, sizes=(1,))
    choice = tuning.choices[0]
    assert choice.winner.family == "aten"
    reasons = {(c.family, r.reason) for c, r in choice.rejections}
    assert reasons == {("fast", "wrong")}
    assert len(choice.rejections) == 6


def test_builds_that_fail_cost_themselves_only(runs: Runs):
    families = (ATEN, Moody("good", "crash", "raise", "refuse"), Refusing("picky", ((),)))
    tuning = runs(RecordedDevice({"aten": 10.0, "moody": 5.0}), families=families, sizes=(1,))
    choice = tuning.choices[0]
    assert choice.winner == Candidate("moody", (("mood", "good"),))
    reasons = {r.reason: r.detail for _, r in choice.rejections}
    assert set(reasons) == {"crash", "compiler", "shared memory", "unsupported"}
    assert "SIGABRT" in reasons["crash"]
    assert "register allocator" in reasons["crash"]
    assert reasons["compiler"] == "RuntimeError: no such instruction"
    assert runs(RecordedDevice({}), families=families, sizes=(1,)).builds == 0


def test_a_task_that_does_not_fit_says_so_and_the_others_go_on(runs: Runs):
    tuning = runs(RecordedDevice({}, fail_open=True), sizes=(1,))
    choice = tuning.choices[0]
    assert choice.status == "failed: out of memory: tried to allocate 1 TB"
    assert choice.winner.family == "aten"
    assert choice.kernel.steps == linear_plan(1).tasks[0].task.form.body


def test_a_spent_budget_leaves_the_rest_unsearched(runs: Runs):
    tuning = runs(device(), budget_s=0.0)
    assert [c.status for c in tuning.choices] == ["not searched", "not searched"]
    assert tuning.stopped == "budget"
    assert tuning.measured == 0
    assert runs(device()).stopped == ""


def test_an_interrupted_run_keeps_what_is_measured_and_continues_there(runs: Runs):
    class Interrupts(RecordedDevice):
        def time(self, candidate, built, rung):  # type: ignore[no-untyped-def]
            if len([1 for kind, _ in self.asked if kind == "time"]) == 5:
                runs.shop.stop.set()
            return super().time(candidate, built, rung)

    partial = runs(Interrupts({"aten": 10.0, "slow": 12.0, "fast": 5.0}))
    assert partial.stopped == "interrupted"
    assert [c.status for c in partial.choices] == ["not searched", "not searched"]
    assert len(partial.choices[0].measurements) == 6
    rest = device()
    whole = runs(rest)
    assert whole.stopped == ""
    first_task = rest.asked[: next(i for i, (kind, _) in enumerate(rest.asked) if kind == "compare")]
    # five candidates of nine (and the one in flight) were timed before; finalists are timed again
    assert len([1 for kind, _ in first_task if kind == "time"]) < 9


def test_events_tell_the_story_in_order(runs: Runs):
    runs(device())
    kinds = [type(e) for e in runs.events if not isinstance(e, CandidateDone)]
    assert kinds == [TuneStarted, *(TaskStarted, TaskDone) * 2, *(ChoiceConfirmed,) * 2, TuneFinished]
    started = runs.events[0]
    assert isinstance(started, TuneStarted)
    assert (started.tasks, started.candidates, started.replayed) == (2, 18, 0)
    assert started.estimate_s > 0
    done = [e for e in runs.events if isinstance(e, CandidateDone)]
    assert done[0].candidate.family == "aten"
    assert done[-1].best_us == 5.0
    assert done[-1].baseline_us == 10.0


def test_a_descent_times_a_part_of_a_large_space(runs: Runs):
    form = msgspec.structs.replace(linear_form(), kind="reduction")
    space = tuple((("n", n), ("m", m)) for n in range(10) for m in range(10))
    climbing = FakeFamily("fast", (space[37], *space))
    settings = TuneOptions(runs.folder / "r.sqlite", runs.folder / "k")
    shop = Workshop((ATEN, climbing), TARGET, device(), settings, runs.take)
    tuning = tune_with(linear_plan(1, form=form), shop)
    assert tuning.choices[0].winner == Candidate("fast", (("n", 0), ("m", 0)))
    assert 10 < tuning.builds < 60
    (trail,) = tuning.choices[0].trails
    assert trail.candidate == Candidate("fast")
    assert [step.to for step in trail.footprints[:-1]] == [step.at.config for step in trail.footprints[1:]]
    told = {tried.config for step in trail.footprints for tried in (step.at, *step.tried)}
    timed = {m.candidate.config for m in tuning.choices[0].measurements if m.candidate.family == "fast"}
    assert told == timed
    shop = Workshop((ATEN, climbing), TARGET, device(), settings, runs.take)
    assert tune_with(linear_plan(1, form=form), shop).choices == tuning.choices


def test_a_weight_is_laid_out_for_all_its_readers(runs: Runs):
    families = (ATEN, FakeFamily("flipped", ((("n", 0),),), layout="transposed"))
    tuning = runs(RecordedDevice({"aten": 10.0, "flipped": 8.0}), families=families)
    assert [c.winner.family for c in tuning.choices] == ["flipped", "flipped"]
    program = tuning.plan.programs[0]
    assert program.weights[0].transforms == (Transpose(),)
    assert program.weights[0].type.strides == (1, 32)
    (key,) = program.forms
    assert key == fingerprint(program.forms[key]) != fingerprint(linear_form())
    assert program.forms[key].parameters[1].type.strides == (1, 32)
    assert {site.form for task in tuning.plan.tasks for site in task.sites} == {key}
    assert json.loads(without_times(tuning))["plan"]["programs"][0]["steps"][0]["form"] == key


class Crowded(RecordedDevice):
    """Finals are disturbed so many times."""

    def __init__(self, disturbed: int) -> None:
        super().__init__({"aten": 10.0, "slow": 12.0, "fast": 5.0})
        self.disturbed = disturbed

    def compare(self, candidates, rung):  # type: ignore[no-untyped-def]
        self.disturbed -= 1
        found = super().compare(candidates, rung)
        return tuple(Samples(s.us, self.disturbed >= 0, self.disturbed >= 0) for s in found if isinstance(s, Samples))


def test_a_disturbed_final_is_repeated(runs: Runs):
    calm = Crowded(2)
    tuning = runs(calm, sizes=(1,))
    assert [kind for kind, _ in calm.asked].count("compare") == 3 + 1  # and the guard
    assert tuning.repeated == 2
    assert tuning.choices[0].status == "tuned"


def test_the_extern_stays_where_the_machine_is_never_calm(runs: Runs):
    tuning = runs(Crowded(1000), sizes=(1,))
    choice = tuning.choices[0]
    assert (choice.status, choice.winner.family) == ("disturbed", "aten")
    assert choice.median_us == choice.baseline_us
    assert any(m.disturbed for m in choice.measurements if m.stage == "final")
    again = runs(RecordedDevice({}), sizes=(1,))
    assert (again.measured, again.choices[0].status) == (0, "disturbed")
    assert runs(device(), sizes=(1,), recheck=True).choices[0].status == "tuned"


class Clumsy(RecordedDevice):
    """Comparisons fail, without saying who did it, while certain candidates are in them together."""

    def __init__(self, *together: int) -> None:
        super().__init__({"aten": 10.0, "slow": 12.0, "fast": 5.0})
        self.together = {Candidate("fast", CONFIGS[n]) for n in together}

    def compare(self, candidates, rung):  # type: ignore[no-untyped-def]
        found = super().compare(candidates, rung)
        blamed = self.together and self.together <= {candidate for candidate, _ in candidates}
        return Rejected("stray write", "wrote around its results") if blamed else found


@pytest.mark.parametrize(("together", "winner"), [((0, 2), 0), ((1,), 0), ((0,), None)])
def test_a_final_that_fails_without_a_culprit_goes_on_with_fewer(
    runs: Runs, together: tuple[int, ...], winner: int | None
):
    """The extern was blamed too, and with it the whole task had failed, now and in all later runs."""
    tuning = runs(Clumsy(*together), sizes=(1,))
    choice = tuning.choices[0]
    assert choice.winner == (Candidate("aten") if winner is None else Candidate("fast", CONFIGS[winner]))
    assert choice.status == ("no gain" if winner is None else "tuned")
    again = runs(RecordedDevice({}), sizes=(1,))
    assert (again.builds, again.measured) == (0, 0)
    assert without_times(again) == without_times(tuning)


def test_an_extern_that_fails_in_a_final_fails_the_task_for_this_run_only(runs: Runs):
    class Faulty(RecordedDevice):
        def compare(self, candidates, rung):  # type: ignore[no-untyped-def]
            _, *others = super().compare(candidates, rung)
            return (Rejected("launch", "CUDA error: an illegal memory access was encountered"), *others)

    assert runs(Faulty(device().times), sizes=(1,)).choices[0].status.startswith("failed: launch")
    assert runs(device(), sizes=(1,)).choices[0].status == "tuned"


class Overloaded(RecordedDevice):
    """A machine that is too busy for one family's kernels."""

    def check(self, candidate, built):  # type: ignore[no-untyped-def]
        found = super().check(candidate, built)
        return Rejected("timeout", "check took longer than 60 s") if candidate.family == "fast" else found


def test_a_failure_that_may_pass_costs_a_candidate_this_run_only(runs: Runs):
    """Such refusals were believed for good: one busy evening took the best candidates out of all later races."""
    busy = runs(Overloaded({"aten": 10.0, "slow": 9.0, "fast": 5.0}), sizes=(1,))
    assert busy.choices[0].winner.family == "slow"
    assert {r.reason for c, r in busy.choices[0].rejections if c.family == "fast"} == {"timeout"}
    assert without_times(runs(RecordedDevice({}), sizes=(1,))) == without_times(busy)  # what is decided stays decided
    new = (*SLOW_AND_FAST, FakeFamily("new", ((),)))
    calm = runs(RecordedDevice({"aten": 10.0, "slow": 9.0, "fast": 5.0, "new": 20.0}), families=new, sizes=(1,))
    assert calm.choices[0].winner.family == "fast"
    assert not [c for c, _ in calm.choices[0].rejections if c.family == "fast"]


def test_what_is_measured_again_counts_more_than_an_old_refusal(runs: Runs):
    """After `--recheck` a winner stood among the rejections, and its times were left out."""
    runs(RecordedDevice(device().times, wrong=("fast",)), sizes=(1,))
    choice = runs(device(), sizes=(1,), recheck=True).choices[0]
    assert choice.winner.family == "fast"
    assert choice.rejections == ()
    assert runs(RecordedDevice({}), sizes=(1,)).choices[0] == choice


class Slow(RecordedDevice):
    """Every timing takes a twentieth of a second on a clock of its own."""

    clock = FakeClock()

    def time(self, candidate, built, rung):  # type: ignore[no-untyped-def]
        self.clock.now += 0.05
        return super().time(candidate, built, rung)


def test_a_budget_ends_a_run_in_time_and_goes_to_the_heaviest_first(runs: Runs):
    plan = linear_plan(1, 8, 64)
    heaviest = msgspec.structs.replace(plan.tasks[1], weight=1e6)
    plan = msgspec.structs.replace(plan, tasks=(plan.tasks[0], heaviest, plan.tasks[2]))
    families = (ATEN, FakeFamily("fast", tuple((("n", n),) for n in range(40))))
    settings = TuneOptions(runs.folder / "r.sqlite", runs.folder / "k", budget_s=1.5)
    shop = Workshop(families, TARGET, Slow({"aten": 40.0, "fast": 5.0}), settings, runs.take, Slow.clock)
    tuning = tune_with(plan, shop)
    assert tuning.seconds < 1.2 * 1.5
    assert tuning.stopped == "budget"
    assert next(e.task for e in runs.events if isinstance(e, TaskStarted)) == heaviest.key
    assert tuning.choices[1].status == "tuned"
    assert "not searched" in {c.status for c in tuning.choices}


def test_families_are_asked_only_about_the_kinds_they_are_about(runs: Runs):
    class Other(Refusing):
        kinds = frozenset({"attention"})

    tuning = runs(device(), families=(ATEN, Other("other", ((),)), FakeFamily("fast", CONFIGS[:1])), sizes=(1,))
    assert tuning.choices[0].rejections == ()
