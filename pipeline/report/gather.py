"""From an artifact's records to a report's facts. Pure: equal records give equal facts."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

import msgspec

from tune_model.extract.task import PlannedTask, Site
from tune_model.package.format.records import ChoiceRecord, NoteRecord, SkippedRecord, StepRecord, TaskRecord
from tune_model.pipeline.report.facts import (
    CandidateFacts,
    KindFacts,
    Missing,
    PhaseFacts,
    PointFacts,
    RejectionFacts,
    ReportFacts,
    SkippedFacts,
    StepTime,
    TaskFacts,
    Totals,
    WholeFacts,
)
from tune_model.pipeline.report.footprints import footprints
from tune_model.pipeline.report.interval import Gain, Part, total_gain
from tune_model.pipeline.report.roofline import Attained, Roofs, floor_us, limited_by, make_roofs, task_dtype
from tune_model.pipeline.report.source import ReportSource
from tune_model.runtime.errors import TuneModelError
from tune_model.runtime.program import Apply, Program
from tune_model.tune.candidate import Candidate, label
from tune_model.tune.choice import Measurement, WholeStep
from tune_model.tune.target import CudaTarget, Target

__all__ = ["gather"]


class _Row(msgspec.Struct, frozen=True):
    """A task with its outcome."""

    planned: PlannedTask
    choice: ChoiceRecord

    @property
    def best_us(self) -> float:
        """The shortest time that is certain: of the winner or the plain operators, in the final."""
        times = [t for t in (self.choice.median_us, self.choice.baseline_us) if t > 0]
        return min(times, default=0.0)

    @property
    def counts(self) -> bool:
        """Its times may be added to others: a disturbed one can be a thousand times too long."""
        return self.choice.status != "disturbed"

    @property
    def part(self) -> Part:
        weight, choice = self.planned.weight, self.choice
        if not self.counts:
            return Part(0.0, 0.0, 1.0, 1.0)
        return Part(weight * choice.baseline_us, weight * choice.median_us, choice.gain_low, choice.gain_high)


def gather(
    source: ReportSource,
    *,
    steps: Mapping[str, Sequence[StepTime]] | None = None,
    missing: Sequence[Missing] = (),
) -> ReportFacts:
    """Return the facts of a report.

    Args:
        source: An artifact's records.
        steps: Whole steps as a benchmark timed them, by grid point: `decode batch=1 context=1024`.
        missing: What a server asked for in vain.
    """
    rows = _rows(source)
    roofs = make_roofs([Attained(row.planned, row.best_us) for row in rows if row.counts], source.target)
    return ReportFacts(
        name=source.name,
        architecture=source.model.architecture,
        task=source.request.task,
        dtype=source.request.dtype,
        parameters=source.model.parameters,
        weight_bytes=source.model.weight_bytes,
        target=source.target.name,
        environment=tuple(_environment(source)),
        memory=source.memory,
        totals=_totals(rows, roofs),
        points=tuple(_points(source, rows, roofs, steps or {})),
        kinds=_kinds(rows),
        tasks=_tasks(rows, roofs),
        roofs=roofs,
        rejections=_rejections(rows),
        phases=tuple(_phase(program, source) for program in source.programs),
        skipped=tuple(
            SkippedFacts(r.skipped.program, r.skipped.op, r.skipped.count, r.skipped.reason)
            for r in source.records
            if isinstance(r, SkippedRecord)
        ),
        missing=tuple(missing),
        notes=tuple(record.text for record in source.records if isinstance(record, NoteRecord)),
    )


def _rows(source: ReportSource) -> list[_Row]:
    tasks = {r.planned.key: r.planned for r in source.records if isinstance(r, TaskRecord)}
    choices = [r for r in source.records if isinstance(r, ChoiceRecord)]
    return [_Row(tasks[choice.task], choice) for choice in choices if choice.task in tasks]


def _environment(source: ReportSource) -> Iterable[tuple[str, str]]:
    yield "tune-model", source.tune_model
    yield from _machine(source.target)
    rules = source.request.rules
    yield "tf32 allowed", "yes" if rules.allow_tf32 else "no"
    yield "nondeterminism allowed", "yes" if rules.allow_nondeterministic else "no"
    yield "matmul rows independent of their number", "yes" if rules.batch_invariant else "no"
    yield from _search(source.config)


def _machine(target: Target) -> Iterable[tuple[str, str]]:
    if isinstance(target, CudaTarget):
        yield "GPU", f"{target.name}, sm_{target.arch}, {target.sm_count} SMs"
        yield "memory", f"{target.memory_bytes / 1e9:.4g} GB, L2 {target.l2_bytes / 1e6:.3g} MB"
        yield "highest clock", f"{target.max_clock_mhz} MHz"
        yield "driver branch", target.driver_branch
        yield "cuBLAS", target.cublas
        yield "triton", target.triton
    else:
        yield "CPU", f"{target.name}, {target.machine}"
        yield "threads", str(target.threads)
        yield "caches", f"L2 {target.l2_bytes / 1e6:.3g} MB per core, L3 {target.l3_bytes / 1e6:.3g} MB"
        yield "instruction sets", " ".join(target.isa) or "the compiler's default"
        yield "compiler", target.compiler
    yield "torch", target.torch


def _search(text: str) -> Iterable[tuple[str, str]]:
    """Tell how hard was looked; a configuration of another version may say it in other words."""
    from tune_model.pipeline.config import parse_config

    try:
        search = parse_config(text, "config.yaml").search
    except TuneModelError:
        return
    yield "effort", search.effort
    yield "budget", search.budget or "none"
    yield "seed", str(search.seed)


def _totals(rows: Sequence[_Row], roofs: Roofs) -> Totals:
    measurements = [m for row in rows for m in row.choice.measurements]
    statuses = Counter(row.choice.status.partition(":")[0] for row in rows)
    return Totals(
        before_us=sum(row.part.before_us for row in rows),
        after_us=sum(row.part.after_us for row in rows),
        floor_us=sum(row.planned.weight * floor_us(row.planned, roofs, row.best_us) for row in rows if row.counts),
        gain=total_gain(row.part for row in rows),
        tasks=len(rows),
        statuses=dict(statuses.most_common()),
        candidates=sum(len({m.candidate for m in row.choice.measurements}) for row in rows),
        measurements=len(measurements),
        disturbed=sum(m.disturbed for m in measurements),
        rejected=sum(len(row.choice.rejections) for row in rows),
    )


def _point_text(site: Site) -> str:
    return " ".join(f"{name}={value}" for name, value in site.point)


def _points(
    source: ReportSource, rows: Sequence[_Row], roofs: Roofs, steps: Mapping[str, Sequence[StepTime]]
) -> Iterable[PointFacts]:
    timed = {(r.step.program, r.step.point): r.step for r in source.records if isinstance(r, StepRecord)}
    parts: dict[tuple[str, tuple[tuple[str, int], ...]], list[tuple[_Row, int]]] = {}
    for row in rows:
        for site in row.planned.sites if row.counts else ():
            parts.setdefault((site.program, site.point), []).append((row, site.occurrences))
    order = {phase.name: number for number, phase in enumerate(source.request.phases)}
    for (phase, point), found in sorted(parts.items(), key=lambda item: (order.get(item[0][0], len(order)), item[0])):
        text = _point_text(Site(phase, point, "", (), 0))
        choices = [(row.choice, times) for row, times in found]
        yield PointFacts(
            phase=phase,
            point=text,
            before_us=sum(choice.baseline_us * times for choice, times in choices),
            after_us=sum(choice.median_us * times for choice, times in choices),
            floor_us=sum(floor_us(row.planned, roofs, row.best_us) * times for row, times in found),
            gain=total_gain(
                Part(c.baseline_us * times, c.median_us * times, c.gain_low, c.gain_high) for c, times in choices
            ),
            whole=_whole(timed.get((phase, point))),
            steps=tuple(steps.get(f"{phase} {text}", ())),
        )


def _whole(step: WholeStep | None) -> WholeFacts | None:
    if step is None or not step.median_us:
        return None
    gain = Gain(step.baseline_us / step.median_us, step.gain_low, step.gain_high)
    return WholeFacts(step.baseline_us, step.median_us, gain)


def _kinds(rows: Sequence[_Row]) -> tuple[KindFacts, ...]:
    kinds: dict[str, list[_Row]] = {}
    for row in rows:
        kinds.setdefault(row.planned.task.form.kind, []).append(row)
    facts = [
        KindFacts(kind, len(found), sum(r.part.before_us for r in found), sum(r.part.after_us for r in found))
        for kind, found in kinds.items()
    ]
    return tuple(sorted(facts, key=lambda fact: (-fact.after_us, fact.kind)))


def _tasks(rows: Sequence[_Row], roofs: Roofs) -> tuple[TaskFacts, ...]:
    before = sum(row.part.before_us for row in rows) or 1.0
    after = sum(row.part.after_us for row in rows) or 1.0
    facts = [_task(row, roofs, before, after) for row in rows]
    return tuple(sorted(facts, key=lambda fact: (-fact.share, fact.key)))


def _task(row: _Row, roofs: Roofs, before_us: float, after_us: float) -> TaskFacts:
    planned, choice = row.planned, row.choice
    race = _race(choice.measurements)
    ratio = choice.baseline_us / choice.median_us if choice.median_us else 1.0
    return TaskFacts(
        key=planned.key,
        label=planned.label,
        kind=planned.task.form.kind,
        dtype=task_dtype(planned),
        weight=planned.weight,
        sites=tuple(f"{s.program} {_point_text(s)} x{s.occurrences}" for s in planned.sites),
        winner=label(choice.winner),
        family=choice.winner.family,
        after_us=choice.median_us,
        before_us=choice.baseline_us,
        gain=Gain(ratio, choice.gain_low, choice.gain_high),
        floor_us=floor_us(planned, roofs, row.best_us),
        bound=limited_by(planned, roofs),
        share=row.part.after_us / after_us,
        share_before=row.part.before_us / before_us,
        status=choice.status,
        flops=planned.flops,
        size_bytes=planned.size_bytes,
        race=race,
        footprints=tuple(step for trail in choice.trails for step in footprints(trail)),
        rejected=dict(Counter(r.reason for _, r in choice.rejections).most_common()),
    )


def _race(measurements: Sequence[Measurement]) -> tuple[CandidateFacts, ...]:
    """Gather each candidate's timings, candidates in the order first timed; of several finals the last counts."""
    timings: dict[Candidate, list[Measurement]] = {}
    for measurement in measurements:
        timings.setdefault(measurement.candidate, []).append(measurement)
    facts: list[CandidateFacts] = []
    for candidate, found in timings.items():
        finals = [m for m in found if m.stage == "final"]
        guards = [m for m in found if m.stage == "guard"]
        last = (guards or finals or found)[-1]
        facts.append(
            CandidateFacts(
                label=label(candidate),
                family=candidate.family,
                race_us=tuple(m.median_us for m in found if m.stage == "race"),
                final_us=finals[-1].median_us if finals else None,
                guard_us=guards[-1].median_us if guards else None,
                low_us=last.low_us,
                high_us=last.high_us,
                error=last.error,
                disturbed=any(m.disturbed for m in found),
            )
        )
    return tuple(facts)


def _rejections(rows: Sequence[_Row]) -> tuple[RejectionFacts, ...]:
    families: dict[str, Counter[str]] = {}
    examples: dict[str, str] = {}
    for row in rows:
        for candidate, rejected in row.choice.rejections:
            families.setdefault(rejected.reason, Counter())[candidate.family] += 1
            examples.setdefault(rejected.reason, f"{label(candidate)}: {rejected.detail}")
    facts = [
        RejectionFacts(reason, found.total(), dict(found.most_common()), examples[reason])
        for reason, found in families.items()
    ]
    return tuple(sorted(facts, key=lambda fact: (-fact.count, fact.reason)))


def _phase(program: Program, source: ReportSource) -> PhaseFacts:
    grid = next((phase.grid for phase in source.request.phases if phase.name == program.name), {})
    regions = sum(isinstance(step, Apply) for step in program.steps)
    return PhaseFacts(
        name=program.name,
        ranges=tuple((s.name, s.minimum, s.maximum) for s in program.symbols),
        grid=dict(grid),
        regions=regions,
        calls=len(program.steps) - regions,
        forms=len(program.forms),
    )
