"""Whole programs with all choices, and without each: by times that a fake timer makes up, and on this machine's CPU."""

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

    Attributes:
        asked: Families of the variants' entries, in order.
    """

    def __init__(self, whole: Mapping[str, float] | None = None, *, fails: bool = False) -> None:
        self.whole = dict(whole or ALONE)
        self.fails = fails
        self.asked: list[tuple[str, ...]] = []
        self.closed = 0

    def compare(self, work: Work) -> tuple[Samples, ...] | Rejected:
        families = tuple(
            "+".join(e.candidate.split("(")[0] for entries in v.entries.values() for e in entries)
            for v in work.variants
        )
        self.asked.append(families)
        if self.fails:
            return Rejected("crash", "the process is gone")
        wobble = [1.0 + 0.001 * (i % 5) for i in range(20)]
        return tuple(Samples(tuple(self.whole[f] * w for w in wobble)) for f in families)

    def close(self) -> None:
        self.closed += 1


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


@pytest.mark.parametrize("whole", [ALONE, {"aten": 10.0, "fast": 11.0, "second": 8.0}])
def test_a_second_run_measures_nothing_and_decides_the_same(tmp_path: Path, whole: dict[str, float]):
    first = tuned(tmp_path, Steps(whole))
    steps = Steps(whole)
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
