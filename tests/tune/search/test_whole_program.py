"""Whole programs with all choices, and without each: by times that a fake timer makes up, and on this machine's CPU."""

import random
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from small_programs import empty_replay, language_model, softmax_program
from tuning_fakes import TARGET, FakeFamily, RecordedDevice, linear_plan, without_times

from tune_model.runtime.kernel import Kernel
from tune_model.runtime.program import Pack, bind_form
from tune_model.runtime.replay import Entry
from tune_model.tune.candidate import Family, Rejected
from tune_model.tune.choice import Tuning
from tune_model.tune.device import Samples
from tune_model.tune.families.aten import FAMILY as ATEN
from tune_model.tune.measuring.contention import Contention
from tune_model.tune.measuring.cpu_stopwatch import CpuStopwatch
from tune_model.tune.measuring.interval import percentile
from tune_model.tune.measuring.step_bench import StepBench, StepWorker, Variant, Work
from tune_model.tune.options import TuneOptions
from tune_model.tune.target import CpuTarget
from tune_model.tune.tuner import tune_with
from tune_model.tune.workshop import Workshop

FAMILIES: tuple[Family, ...] = (
    ATEN,
    FakeFamily("fast", ((("n", 0),),)),
    FakeFamily("second", ((("n", 0),),)),
)
ALONE = {"aten": 10.0, "fast": 5.0, "second": 7.0}


class Steps:
    """A timer that knows what each family's kernel costs the step as a whole.

    Args:
        whole: Microseconds of the step by family.
        fails: Whatever is asked.
        later: Other times in every process but the first.
        noise: Relative, of every sample.
        disturbed: So many comparisons are.

    Attributes:
        asked: Families of the variants' entries, in order.
        seeds: In the same order.
    """

    def __init__(
        self,
        whole: Mapping[str, float] | None = None,
        *,
        fails: bool = False,
        later: Mapping[str, float] | None = None,
        noise: float = 0.0,
        disturbed: int = 0,
    ) -> None:
        self.whole = dict(whole or ALONE)
        self.later = dict(later or {})
        self.fails = fails
        self.noise = noise
        self.disturbed = disturbed
        self.dice = random.Random(9)  # noqa: S311 (repeatable noise)
        self.asked: list[tuple[str, ...]] = []
        self.seeds: list[int] = []
        self.closed = 0

    def compare(self, work: Work) -> tuple[Samples, ...] | Rejected:
        families = tuple(
            "+".join(e.candidate.split("(")[0] for entries in v.entries.values() for e in entries)
            for v in work.variants
        )
        self.asked.append(families)
        self.seeds.append(work.seed)
        if self.fails:
            return Rejected("crash", "the process is gone")
        self.disturbed -= 1
        flags = (self.disturbed >= 0, self.disturbed >= 0)
        return tuple(Samples(tuple(self._us(family, i) for i in range(20)), *flags) for family in families)

    def _us(self, family: str, number: int) -> float:
        return self.whole[family] * (1.0 + 0.001 * (number % 5)) * self.dice.lognormvariate(0.0, self.noise)

    def close(self) -> None:
        self.closed += 1
        self.whole |= self.later


def tuned(folder: Path, steps: Steps | None, sizes: tuple[int, ...] = (1, 8), **options: object) -> Tuning:
    settings = TuneOptions(folder / "records.sqlite", folder / "kernels", **options)
    shop = Workshop(FAMILIES, TARGET, RecordedDevice(ALONE), settings, lambda _: None)
    return tune_with(linear_plan(*sizes), shop, steps)


def winners(tuning: Tuning) -> list[str]:
    return [choice.winner.family for choice in tuning.choices]


def test_a_step_that_gains_what_its_tasks_gain_is_believed(tmp_path: Path):
    steps = Steps()
    tuning = tuned(tmp_path, steps)
    assert winners(tuning) == ["fast", "fast"]
    assert steps.asked == [("aten", "fast"), ("aten", "fast")]  # one for each point
    assert steps.closed == 1
    assert [(step.program, step.point) for step in tuning.steps] == [
        ("forward", (("batch", 1),)),
        ("forward", (("batch", 8),)),
    ]
    step = tuning.steps[0]
    assert (step.baseline_us, step.median_us) == (pytest.approx(10.02), pytest.approx(5.01))
    assert (step.gain_low, step.gain_high) == (pytest.approx(2.0), pytest.approx(2.0))


def test_a_choice_that_slows_the_step_gives_way_to_the_next(tmp_path: Path):
    """Alone `fast` takes half the time; in the step it costs more than it gains, and `second` does not."""
    steps = Steps({"aten": 10.0, "fast": 11.0, "second": 8.0})
    tuning = tuned(tmp_path, steps)
    assert winners(tuning) == ["second", "second"]
    choice = tuning.choices[0]
    assert choice.status == "tuned"
    (rejected,) = [r for c, r in choice.rejections if c.family == "fast"]
    assert rejected.reason == "step"
    assert "0.01102 ms with it and 0.01002 ms without" in rejected.detail
    assert tuning.steps[0].median_us == pytest.approx(8.016)


def test_the_extern_stays_where_nothing_helps_the_step(tmp_path: Path):
    tuning = tuned(tmp_path, Steps({"aten": 10.0, "fast": 11.0, "second": 12.0}))
    assert winners(tuning) == ["aten", "aten"]
    assert {choice.status for choice in tuning.choices} == {"no gain"}
    assert tuning.steps == ()


def test_a_choice_that_gains_less_than_it_promised_but_gains_stays(tmp_path: Path):
    steps = Steps({"aten": 10.0, "fast": 9.0, "second": 8.0})
    tuning = tuned(tmp_path, steps, sizes=(1,))
    assert winners(tuning) == ["fast"]
    assert steps.asked == [("aten", "fast")]  # without its one choice the step is the one with externs


def test_a_choice_is_given_up_only_after_a_second_look_in_another_process(tmp_path: Path):
    steps = Steps({"aten": 10.0, "fast": 11.0, "second": 8.0}, later={"fast": 5.0})
    tuning = tuned(tmp_path, steps, sizes=(1,))
    assert winners(tuning) == ["fast"]
    assert steps.asked == [("aten", "fast")] * 2  # slower at first, and not when looked at again
    assert steps.closed == 2
    assert len(set(steps.seeds)) == 2


def test_what_is_too_little_to_win_by_is_too_little_to_be_given_up_for(tmp_path: Path):
    """However sure a step's last tenth of a percent is: the next process has other addresses."""
    tuning = tuned(tmp_path, Steps({"aten": 10.0, "fast": 10.02, "second": 8.0}))
    assert winners(tuning) == ["fast", "fast"]


def test_of_many_choices_that_change_nothing_none_is_given_up(tmp_path: Path):
    """At 95 % each, one in forty was thrown out, and that was recorded for good."""
    sizes = tuple(range(1, 81))
    steps = Steps({"aten": 10.0, "fast": 10.0, "second": 10.0}, noise=0.02)
    tuning = tuned(tmp_path, steps, sizes=sizes)
    assert len(steps.asked) > len(sizes)  # some did seem to harm their step
    assert winners(tuning) == ["fast"] * len(sizes)


def test_a_step_that_is_disturbed_is_timed_again(tmp_path: Path):
    steps = Steps({"aten": 10.0, "fast": 11.0, "second": 8.0}, disturbed=2)
    tuning = tuned(tmp_path, steps, sizes=(1,))
    assert steps.asked[:3] == [("aten", "fast")] * 3
    assert tuning.repeated == 2
    assert winners(tuning) == ["second"]


def test_a_step_that_is_always_disturbed_decides_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    tuning = tuned(tmp_path, Steps({"aten": 10.0, "fast": 11.0, "second": 8.0}, disturbed=1000), sizes=(1,))
    assert winners(tuning) == ["fast"]
    assert tuning.steps == ()
    assert "other processes were in the way" in caplog.text
    steps = Steps({})
    again = tuned(tmp_path, steps, sizes=(1,))
    assert steps.asked == []
    assert without_times(again) == without_times(tuning)
    recheck = tuned(tmp_path, Steps({"aten": 10.0, "fast": 11.0, "second": 8.0}), sizes=(1,), recheck=True)
    assert winners(recheck) == ["second"]


SLOW_AT_FIRST = {"later": {"fast": 5.0}}


@pytest.mark.parametrize(
    ("whole", "more"),
    [(ALONE, {}), ({"aten": 10.0, "fast": 11.0, "second": 8.0}, {}), (ALONE | {"fast": 11.0}, SLOW_AT_FIRST)],
)
def test_a_second_run_measures_nothing_and_decides_the_same(tmp_path: Path, whole: dict[str, float], more: dict):
    first = tuned(tmp_path, Steps(whole, **more))
    steps = Steps({})
    second = tuned(tmp_path, steps)
    assert steps.asked == []
    assert (second.builds, second.measured) == (0, 0)
    assert without_times(second) == without_times(first)


def test_without_a_timer_nothing_is_asked(tmp_path: Path):
    tuning = tuned(tmp_path, None)
    assert winners(tuning) == ["fast", "fast"]
    assert tuning.steps == ()


def test_steps_that_cannot_be_timed_change_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    tuning = tuned(tmp_path, Steps(fails=True))
    assert winners(tuning) == ["fast", "fast"]
    assert tuning.steps == ()
    assert "could not be timed as a whole: crash" in caplog.text


CPU = CpuTarget("x86_64", (), "Test CPU", 1, 1 << 20, 1 << 25, "g++ 12.2", "2.13")


def plain(phase: str) -> Variant:
    return Variant(language_model(phase), dict(empty_replay().forms), {})


def test_a_program_runs_with_made_up_weights_and_inputs():
    before = torch.get_num_threads()
    try:
        bench = StepBench(CPU)
        for phase, point in (("prefill", {"batch": 2, "sequence": 7}), ("decode", {"batch": 3, "context": 9})):
            found = bench.compare(Work(point, (plain(phase), plain(phase)), seed=1))
            assert isinstance(found, tuple)
            assert len(found[0].us) == len(found[1].us) >= 9
            assert min(*found[0].us, *found[1].us) > 0
        # The five weights that both phases read are there once, and so is the head's, which the embedding's is.
        assert len(bench._weights) == 5
    finally:
        torch.set_num_threads(before)


class Busy(Contention):
    """Other processes take the core during every sample."""

    def __init__(self) -> None:
        self.waited = 0.0

    def waited_us(self) -> float:
        self.waited += 1e6
        return self.waited


def test_a_busy_machine_shows():
    """Whatever the neighbours did was taken for what the kernels do."""
    before = torch.get_num_threads()
    try:
        bench = StepBench(CPU)
        bench._stopwatch = CpuStopwatch(Busy())
        found = bench.compare(Work({"batch": 1, "context": 3}, (plain("decode"), plain("decode")), seed=1))
    finally:
        torch.set_num_threads(before)
    assert isinstance(found, tuple)
    assert all(samples.doubtful and samples.disturbed for samples in found)


def test_a_slower_set_of_kernels_shows():
    """The same softmax program, its linear layer once and ten times."""
    program = softmax_program(256, 256)
    (key,) = program.forms
    form = bind_form(program.forms[key], (64,))
    once = Entry((64,), "t", "once", Kernel(form.body), 1, 1, 1, 1)
    often = Entry((64,), "t", "often", Kernel((*(form.body[:1] * 30), *form.body)), 1, 1, 1, 1)
    variants = tuple(Variant(program, {key: (entry,)}, {}) for entry in (once, often))
    before = torch.get_num_threads()
    try:
        found = StepBench(CPU).compare(Work({"b": 4, "s": 16}, variants, seed=2))
    finally:
        torch.set_num_threads(before)
    assert isinstance(found, tuple)
    assert sorted(found[0].us)[4] < sorted(found[1].us)[4]


def test_packed_and_turned_weights_are_made_in_their_layouts():
    import msgspec

    program = softmax_program(64, 64)
    weights = (msgspec.structs.replace(program.weights[0], transforms=(Pack("mkldnn"),)), program.weights[1])
    before = torch.get_num_threads()
    try:
        bench = StepBench(CPU)
        assert bench._weight(weights[0]).is_mkldnn
        assert bench._weight(weights[0]) is bench._weight(weights[0])
        assert not bench._weight(program.weights[0]).is_mkldnn
    finally:
        torch.set_num_threads(before)


@pytest.mark.gpu
def test_steps_are_graphs_on_a_gpu():
    from tune_model.tune.machine.probe import probe_target

    bench = StepBench(probe_target("cuda"))
    for phase, point in (("prefill", {"batch": 2, "sequence": 7}), ("decode", {"batch": 3, "context": 9})):
        found = bench.compare(Work(point, (plain(phase), plain(phase)), seed=1))
        assert isinstance(found, tuple)
        assert min(*found[0].us, *found[1].us) > 0
    program = softmax_program(512, 512)
    (key,) = program.forms
    form = bind_form(program.forms[key], (4096,))
    entries = [
        Entry((4096,), "t", name, Kernel((*(form.body[:1] * extra), *form.body)), 1, 1, 1, 1)
        for name, extra in (("once", 0), ("often", 9))
    ]
    work = Work({"b": 64, "s": 64}, tuple(Variant(program, {key: (e,)}, {}) for e in entries), seed=2)
    found = bench.compare(work)
    assert isinstance(found, tuple)
    assert percentile(found[0].us, 0.5) < percentile(found[1].us, 0.5)


def test_a_process_of_its_own_answers_and_may_die():
    worker = StepWorker(CPU)
    try:
        work = Work({"batch": 1, "context": 3}, (plain("decode"), plain("decode")), seed=3)
        found = worker.compare(work)
        assert isinstance(found, tuple)
        assert len(found) == 2
        broken = Work({"batch": 1, "context": 3}, (Variant(language_model("decode"), {"x": ()}, {}),) * 2, seed=3)
        assert isinstance(worker.compare(broken), tuple)
        wrong = worker.compare(Work({"batch": -1, "context": 3}, (plain("decode"),) * 2, seed=3))
        assert isinstance(wrong, Rejected)
        assert isinstance(worker.compare(work), tuple)  # in a new one
    finally:
        worker.close()


def test_a_process_that_hangs_is_ended():
    worker = StepWorker(CPU, limit_s=0.01)
    found = worker.compare(Work({"batch": 1, "context": 3}, (plain("decode"),) * 2, seed=3))
    assert isinstance(found, Rejected)
    assert found.reason == "timeout"
