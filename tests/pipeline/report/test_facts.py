"""Facts of a report, on the two_layers artifact whose every number is known."""

import msgspec
import pytest
from reported import with_report
from two_layers import contents, tuning

from tune_model.package.contents import ArtifactContents
from tune_model.package.read import open_artifact
from tune_model.package.write import write_artifact
from tune_model.pipeline.report.facts import ReportFacts, WholeFacts
from tune_model.pipeline.report.gather import gather
from tune_model.pipeline.report.interval import Gain
from tune_model.pipeline.report.source import from_artifact, from_contents
from tune_model.pipeline.report.words import between_tasks, verdict, whole_steps
from tune_model.tune.candidate import Candidate
from tune_model.tune.choice import Measurement, WholeStep
from tune_model.tune.records.facts import Trail
from tune_model.tune.search.descent import Footprint, Tried


@pytest.fixture(scope="module")
def facts() -> ReportFacts:
    return gather(from_contents(contents()))


def test_totals_are_the_weighted_sums(facts: ReportFacts):
    # Two tasks of weight 2: 3.0 us becomes 1.5 us, and 3.0 us stays.
    totals = facts.totals
    assert (totals.before_us, totals.after_us) == (12.0, 9.0)
    assert totals.gain.ratio == pytest.approx(12 / 9)
    assert totals.gain.low < 12 / 9 < totals.gain.high
    assert totals.statuses == {"tuned": 1, "no gain": 1}
    assert (totals.tasks, totals.candidates, totals.measurements, totals.rejected) == (2, 4, 4, 2)


def test_the_interval_of_a_sum_is_narrower_than_its_uncertain_part(facts: ReportFacts):
    # The certain half of the time takes part of the other's uncertainty away: 1.8 to 2.2 around 2, half of the sum.
    gain = facts.totals.gain
    assert gain.high / gain.low < 2.2 / 1.8
    assert gain.high / gain.low > 1.0


def test_points_add_up_occurrences(facts: ReportFacts):
    assert [(p.phase, p.point, p.before_us, p.after_us) for p in facts.points] == [
        ("forward", "batch=1", 6.0, 3.0),
        ("forward", "batch=16", 6.0, 6.0),
    ]
    assert [p.gain.ratio for p in facts.points] == [2.0, 1.0]


def test_whole_steps_are_those_timed_while_tuning():
    timed = WholeStep("forward", (("batch", 1),), 4.0, 8.0, 1.9, 2.1)
    elsewhere = WholeStep("forward", (("batch", 3),), 1.0, 1.0, 1.0, 1.0)
    base = contents().tuning
    facts = gather(from_contents(contents(tuning=msgspec.structs.replace(base, steps=(timed, elsewhere)))))
    assert [point.whole for point in facts.points] == [WholeFacts(8.0, 4.0, Gain(2.0, 1.9, 2.1)), None]
    # Its tasks add up to 3 us.
    assert [between_tasks(point) for point in facts.points] == ["1 us", "-"]
    assert whole_steps(facts) == (
        "Whole steps, timed as one, gain 2.00x (forward batch=1: 4 us instead of 8 us, 95 % interval 1.90 to 2.10)."
    )
    assert whole_steps(gather(from_contents(contents()))) == ""


def test_floors_are_at_the_best_rate_and_never_above_the_time_seen(facts: ReportFacts):
    by_label = {t.label: t for t in facts.tasks}
    one, sixteen = by_label["matmul 1x8x8 f32 + relu"], by_label["matmul 16x8x8 f32 + relu"]
    # 640 bytes in 1.5 us is the best rate of bytes, 2048 operations in 3 us that of operations.
    assert facts.roofs.bytes_per_us == pytest.approx(640 / 1.5)
    assert facts.roofs.flops_per_us == {"float32": pytest.approx(2048 / 3.0)}
    assert facts.roofs.from_cache
    assert (one.floor_us, one.bound) == (1.5, "memory")
    assert (sixteen.floor_us, sixteen.bound) == (3.0, "compute")
    assert facts.totals.floor_us == pytest.approx(9.0)


def test_races_keep_the_order_and_tell_first_timings_from_finals():
    loops, other = Candidate("cpp_small", (("unroll", 8),)), Candidate("cpp_small", (("unroll", 1),))
    base = contents()
    measurements = (
        Measurement(Candidate("aten"), 3.0, 2.9, 3.1, 5, "race"),
        Measurement(other, 4.0, 3.9, 4.1, 5, "race"),
        Measurement(loops, 1.7, 1.6, 1.9, 5, "race"),
        Measurement(loops, 1.6, 1.6, 1.7, 8, "race", disturbed=True),
        Measurement(Candidate("aten"), 3.0, 2.9, 3.2, 9, "final"),
        Measurement(loops, 1.5, 1.4, 1.75, 9, "final", error=1e-7),
        Measurement(loops, 1.55, 1.5, 1.6, 9, "guard"),
    )
    first, *rest = base.tuning.choices
    changed = msgspec.structs.replace(
        base.tuning, choices=(msgspec.structs.replace(first, measurements=measurements), *rest)
    )
    found = gather(from_contents(contents(tuning=changed)))
    race = next(t for t in found.tasks if t.winner == "cpp_small(unroll=8)").race
    assert [(c.label, c.race_us, c.final_us, c.guard_us) for c in race] == [
        ("aten", (3.0,), 3.0, None),
        ("cpp_small(unroll=1)", (4.0,), None, None),
        ("cpp_small(unroll=8)", (1.7, 1.6), 1.5, 1.55),
    ]
    assert [c.us for c in race] == [3.0, 4.0, 1.55]
    assert found.totals.disturbed == 1


def test_footprints_say_what_changed():
    start, faster = (("unroll", 1), ("grain", 64)), (("unroll", 2), ("grain", 64))
    trail = Trail(
        Candidate("cpp_small"),
        (
            Footprint(
                0, Tried(start, 4.0), "neighbours", (Tried(faster, 3.0), Tried((("unroll", 1), ("grain", 32)))), faster
            ),
            Footprint(0, Tried(faster, 3.0), "diagonals", ()),
        ),
    )
    base = contents()
    first, *rest = base.tuning.choices
    choices = (msgspec.structs.replace(first, trails=(trail,)), *rest)
    found = gather(from_contents(contents(tuning=msgspec.structs.replace(base.tuning, choices=choices))))
    task = next(t for t in found.tasks if t.footprints)
    assert [(s.at, s.at_us, s.tried, s.around, s.moved) for s in task.footprints] == [
        ("cpp_small(unroll=1, grain=64)", 4.0, 2, "neighbours", "unroll 1 -> 2"),
        ("cpp_small(unroll=2, grain=64)", 3.0, 0, "diagonals", ""),
    ]


def test_rejections_are_counted_by_reason_with_an_example(facts: ReportFacts):
    (rejection,) = facts.rejections
    assert (rejection.reason, rejection.count, rejection.families) == ("unsupported", 2, {"mkl_packed": 2})
    assert rejection.example == "mkl_packed: 8 columns; needs 16"


def test_coverage_and_environment(facts: ReportFacts):
    (phase,) = facts.phases
    assert (phase.ranges, phase.grid, phase.regions, phase.calls) == ((("batch", 1, 64),), {"batch": (1, 16)}, 2, 1)
    assert facts.skipped[0].op == "aten.mul.Tensor"
    assert dict(facts.environment)["compiler"] == "g++"


def test_failures_count_as_one_status():
    base = tuning(b"")
    choices = tuple(msgspec.structs.replace(c, status=f"failed: out of memory {i}") for i, c in enumerate(base.choices))
    found = gather(from_contents(contents(tuning=msgspec.structs.replace(base, choices=choices))))
    assert found.totals.statuses == {"failed": 2}


def test_a_disturbed_task_is_in_no_sum():
    base = contents().tuning
    first, second = base.choices
    busy = msgspec.structs.replace(second, median_us=9e4, baseline_us=9e4, status="disturbed")
    facts = gather(from_contents(contents(tuning=msgspec.structs.replace(base, choices=(first, busy)))))
    assert (facts.totals.before_us, facts.totals.after_us, facts.totals.gain.ratio) == (6.0, 3.0, 2.0)
    assert [(t.status, t.share) for t in facts.tasks] == [("tuned", 1.0), ("disturbed", 0.0)]
    assert [p.point for p in facts.points] == ["batch=1"]
    assert facts.roofs.flops_per_us == {"float32": pytest.approx(128 / 1.5)}
    assert "1 tasks whose times other processes disturbed are left out" in verdict(facts)


def test_where_nothing_could_be_decided_that_is_the_verdict():
    """It used to say that the tasks take `- instead of -`, and no gain, as if that had been found out."""
    base = contents().tuning
    busy = tuple(msgspec.structs.replace(c, winner=Candidate("aten"), status="disturbed") for c in base.choices)
    facts = gather(from_contents(contents(tuning=msgspec.structs.replace(base, choices=busy))))
    assert verdict(facts) == (
        "No task could be decided, so the plain operators stay everywhere. 2 tasks whose times other processes "
        "disturbed are left out of all sums; tune again with --recheck on an idle machine."
    )


def test_nothing_measured_is_a_report_too():
    base = tuning(b"")
    choices = tuple(
        msgspec.structs.replace(c, median_us=0.0, baseline_us=0.0, measurements=(), status="not searched")
        for c in base.choices
    )
    found = gather(from_contents(contents(tuning=msgspec.structs.replace(base, choices=choices))))
    assert (found.totals.gain.ratio, found.totals.after_us, found.roofs.bytes_per_us) == (1.0, 0.0, 0.0)


def test_the_report_inside_is_the_one_made_of_the_artifact(tmp_path):
    from tune_model.pipeline.report.html import render_html

    made: ArtifactContents = with_report(contents())
    artifact = open_artifact(write_artifact(tmp_path / "a.tuned", made))
    assert artifact.report() == render_html(gather(from_artifact(artifact)))
