"""What changed from one artifact to another: choices, times, versions; and whether it got slower beyond the noise.

On one machine (equal second fingerprints) the plain operators ran the same code both times, so what they drifted is the
machine's drift and not the choices'. There are two ways to take it out, and each is right somewhere. A winner's time
relative to its own task's operators, taken in the same final, is right where a machine's speed differs from task to
task: a CPU that others use, a GPU whose clocks follow its power. Its time relative to the median drift of all operators
is right where operators take another time though nothing changed (on an H200 up to 7 % from one tuning to the next,
while the winners took the same). Tasks whose times depend on the same thing are compared in the way under which they
agree best, and how well they agree is part of the noise. Between machines, or library or driver versions, the operators
differ too, and times are compared as they are.

A slowdown is an estimate with an interval: the two finals' errors are independent, so their variances add up. What was
measured once and stands in both (a re-tune over the same records, an artifact beside itself) has not changed, however
little its times may say.
"""

import math
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Final, Literal

import msgspec

from tune_model.extract.task import PlannedTask
from tune_model.package.format.manifest import Manifest
from tune_model.package.format.records import ChoiceRecord, TaskRecord
from tune_model.package.read import Artifact
from tune_model.runtime.errors import TuneModelError
from tune_model.tune.candidate import label
from tune_model.tune.estimate import is_hot
from tune_model.tune.measuring.interval import SIGMAS_95, bounds, log_deviation, log_deviation_of_sum
from tune_model.tune.target import CudaTarget

__all__ = ["ArtifactDiff", "Changed", "DiffError", "Slowdown", "TaskDiff", "diff_artifacts", "slower_than"]

_SIGMAS_TASK: Final = 3.0
"""A task counts as slower from three standard deviations on: among fifty, two happen by chance every other time."""

_ENOUGH: Final = 6
"""Tasks measured both times, to tell by how they agree which correction is right; fewer are compared each by itself."""

_COMPARED_AT_LEAST: Final = 0.9
"""Of the weighted time: a gate that saw less of it has not seen what it is to let through."""

_SHARE_THAT_MATTERS: Final = 0.01
"""A task with less of the weighted time does not fail a release by itself; it is in the total all the same."""

_PERCENTILE_WIDTH: Final = 1.683
"""20th to 80th percentile of a normal distribution, in standard deviations."""

_MEDIAN_FACTOR: Final = 1.2533
"""Standard error of a median over that of a mean: sqrt(pi / 2)."""

_MAD_FACTOR: Final = 1.4826
"""Standard deviation of a normal distribution over its median absolute deviation."""


class DiffError(TuneModelError):
    """Two artifacts have nothing that could be compared."""


class Slowdown(msgspec.Struct, frozen=True):
    """New time over old: above 1 is slower.

    Attributes:
        ratio: Estimate.
        deviation: Standard deviation of its logarithm.
    """

    ratio: float
    deviation: float

    def bounds(self, sigmas: float = SIGMAS_95) -> tuple[float, float]:
        """Return the interval of so many standard deviations to each side; 95 % by default."""
        return bounds(self.ratio, self.deviation, sigmas)


_UNCHANGED: Final = Slowdown(1.0, 0.0)


class TaskDiff(msgspec.Struct, frozen=True):
    """One task in both artifacts.

    Attributes:
        key: Of the task.
        label: For people.
        share: Of the old artifact's weighted time, 0 to 1.
        old_winner: Candidate.
        new_winner: Candidate.
        old_us: Time of the old winner.
        new_us: Time of the new one.
        old_status: As in `Choice`.
        new_status: The same of the new artifact.
        slowdown: `None` when one of the two has no time, or one that other processes disturbed, unless both have it
            from one measurement.
        verdict: Beyond the noise (three standard deviations): `slower`, `faster`; else `same`; `not timed`.
    """

    key: str
    label: str
    share: float
    old_winner: str
    new_winner: str
    old_us: float
    new_us: float
    old_status: str
    new_status: str
    slowdown: Slowdown | None
    verdict: Literal["slower", "faster", "same", "not timed"]


class Changed(msgspec.Struct, frozen=True):
    """A fact about the artifact that differs."""

    field: str
    old: str
    new: str


class ArtifactDiff(msgspec.Struct, frozen=True):
    """Everything that differs.

    Attributes:
        same_machine: Second fingerprints are equal, so the machine's drift is told from the choices'.
        old_us: Weighted time of the tasks that both have, as measured; without disturbed ones.
        new_us: The same of the new artifact.
        slowdown: Of that sum, corrected for the machine's drift on one machine.
        drift: New over old time of the plain operators, the median of all tasks: what the machine did meanwhile.
        compared: Share of the weighted time that was compared, 0 to 1: of the old artifact or of the new, whichever is
            less. The rest are tasks that are only in one, or were disturbed or not timed; one without any time of its
            own counts as much as the average of the others.
        tasks: In both, largest change of weighted time first.
        only_old: Labels of tasks that the new one lacks.
        only_new: Labels of tasks that the old one lacks.
        changed: Versions, target, request and files that differ.
    """

    same_machine: bool
    old_us: float
    new_us: float
    slowdown: Slowdown
    drift: float
    compared: float
    tasks: tuple[TaskDiff, ...]
    only_old: tuple[str, ...]
    only_new: tuple[str, ...]
    changed: tuple[Changed, ...]


class _Reference(msgspec.Struct, frozen=True):
    """What times of some tasks are compared beside.

    Attributes:
        drift: Of all operators, by which times are divided; `None` where each task has its own operators.
        deviation: Of the drift's logarithm.
        spread: Standard deviation of the logarithm from task to task of what is compared, outliers left out.
    """

    drift: float | None = None
    deviation: float = 0.0
    spread: float = 0.0


class _Outcome(msgspec.Struct, frozen=True):
    planned: PlannedTask
    choice: ChoiceRecord


def diff_artifacts(old: Artifact, new: Artifact) -> ArtifactDiff:
    """Compare two artifacts of one model.

    Raises:
        DiffError: They have no task in common.
        ArtifactError: Records cannot be read.
    """
    before, after = _outcomes(old), _outcomes(new)
    common = [key for key in before if key in after]
    if not common:
        raise DiffError(f"{old.path} and {new.path} have no task in common; expected two tunings of one model")
    same = old.manifest.must_match_to_stay_optimal == new.manifest.must_match_to_stay_optimal
    pairs = {key: (before[key], after[key]) for key in common}
    total_us = sum(o.planned.weight * o.choice.median_us for o, _ in pairs.values()) or 1.0
    on_gpu = isinstance(old.manifest.target, CudaTarget)
    groups = {key: on_gpu and is_hot(o.planned) for key, (o, _) in pairs.items()}
    drift, deviation = _drift(pairs.values())
    references = {
        hot: _reference([pair for key, pair in pairs.items() if groups[key] == hot], drift, deviation)
        for hot in set(groups.values())
    }
    itself = old.manifest == new.manifest  # which has the SHA-256 of every file
    slowdowns = {
        key: _UNCHANGED if itself else _slowdown(o.choice, n.choice, references[groups[key]] if same else None)
        for key, (o, n) in pairs.items()
    }
    tasks = [_task(key, o, n, total_us, slowdowns[key]) for key, (o, n) in pairs.items()]
    counted = [t for t in tasks if t.slowdown is not None and "disturbed" not in {t.old_status, t.new_status}]
    weights = {key: o.planned.weight for key, (o, _) in pairs.items()}
    return ArtifactDiff(
        same_machine=same,
        old_us=sum(weights[t.key] * t.old_us for t in counted),
        new_us=sum(weights[t.key] * t.new_us for t in counted),
        slowdown=_total((weights[t.key] * t.old_us, t.slowdown) for t in counted),
        drift=drift,
        compared=min(_compared(side, other, tasks) for side, other in ((before, after), (after, before))),
        tasks=tuple(sorted(tasks, key=lambda t: (-abs(t.new_us - t.old_us) * weights[t.key], t.key))),
        only_old=tuple(before[key].planned.label for key in before if key not in after),
        only_new=tuple(after[key].planned.label for key in after if key not in before),
        changed=tuple(_changed(old, new)),
    )


def slower_than(diff: ArtifactDiff, limit: float) -> tuple[str, ...]:
    """Say what got slower by more than a limit, beyond the noise; empty when nothing did.

    Where less than nine tenths of the weighted time could be compared that is said too: such artifacts pass no gate.

    Args:
        diff: Of two artifacts.
        limit: Share of the old time: 0.03 is 3 %; 0 lets nothing through that is slower beyond the noise. A slowdown
            counts when its estimate exceeds the limit and its interval lies above 1: 95 % for the whole, three standard
            deviations for a task, which must have at least a hundredth of the weighted time.
    """
    found: list[str] = []
    if all(task.slowdown is None for task in diff.tasks):
        found.append("nothing could be compared: every task was disturbed or not timed in one of the two")
    elif diff.compared < _COMPARED_AT_LEAST:
        untimed = sum(task.slowdown is None for task in diff.tasks)
        found.append(
            f"only {diff.compared:.1%} of the weighted time could be compared, expected {_COMPARED_AT_LEAST:.0%}: "
            f"{untimed} tasks were disturbed or not timed in one of the two, {len(diff.only_old)} are only in the old "
            f"artifact, {len(diff.only_new)} only in the new one"
        )
    if diff.slowdown.ratio > 1.0 + limit and diff.slowdown.bounds()[0] > 1.0:
        found.append(f"the weighted time of all tasks is slower by {diff.slowdown.ratio - 1.0:.1%}")
    for task in sorted(diff.tasks, key=lambda t: -t.share):
        slowdown = task.slowdown
        heavy = task.share >= _SHARE_THAT_MATTERS
        if heavy and task.verdict == "slower" and slowdown is not None and slowdown.ratio > 1.0 + limit:
            found.append(f"{task.label} is slower by {slowdown.ratio - 1.0:.1%}")
    return tuple(found)


def _outcomes(artifact: Artifact) -> dict[str, _Outcome]:
    tasks: dict[str, PlannedTask] = {}
    outcomes: dict[str, _Outcome] = {}
    for record in artifact.records():
        if isinstance(record, TaskRecord):
            tasks[record.planned.key] = record.planned
        elif isinstance(record, ChoiceRecord) and record.task in tasks:
            outcomes[record.task] = _Outcome(tasks[record.task], record)
    return outcomes


def _task(key: str, old: _Outcome, new: _Outcome, total_us: float, slowdown: Slowdown | None) -> TaskDiff:
    verdict: Literal["slower", "faster", "same", "not timed"] = "same"
    if slowdown is None:
        verdict = "not timed"
    else:
        low, high = slowdown.bounds(_SIGMAS_TASK)
        if low > 1.0 or high < 1.0:
            verdict = "slower" if low > 1.0 else "faster"
    return TaskDiff(
        key=key,
        label=old.planned.label,
        share=old.planned.weight * old.choice.median_us / total_us,
        old_winner=label(old.choice.winner),
        new_winner=label(new.choice.winner),
        old_us=old.choice.median_us,
        new_us=new.choice.median_us,
        old_status=old.choice.status,
        new_status=new.choice.status,
        slowdown=slowdown,
        verdict=verdict,
    )


def _compared(side: Mapping[str, _Outcome], other: Mapping[str, _Outcome], tasks: Iterable[TaskDiff]) -> float:
    """Return the share of a side's weighted time that was compared."""
    known = {key: _known_us(outcome) or _known_us(other.get(key)) for key, outcome in side.items()}
    timed = [us for us in known.values() if us > 0]
    usual = sum(timed) / len(timed) if timed else 1.0
    weighted = {key: us or usual for key, us in known.items()}
    return sum(weighted[task.key] for task in tasks if task.slowdown is not None) / sum(weighted.values())


def _known_us(outcome: _Outcome | None) -> float:
    """Return the weighted time of a task as far as it can be believed, else 0."""
    if outcome is None or outcome.choice.status == "disturbed":
        return 0.0
    return outcome.planned.weight * outcome.choice.median_us


def _slowdown(old: ChoiceRecord, new: ChoiceRecord, beside: _Reference | None) -> Slowdown | None:
    """Compare a task's times: as they are, or beside what tells the machine's drift."""
    if beside is not None and _is_copy(old, new):
        return _UNCHANGED
    if not _is_timed(old) or not _is_timed(new):
        return None
    ratio, deviation = new.median_us / old.median_us, math.hypot(_time_deviation(old), _time_deviation(new))
    if beside is None:
        return Slowdown(ratio, deviation)
    if beside.drift is not None or old.baseline_us <= 0 or new.baseline_us <= 0:
        return Slowdown(ratio / (beside.drift or 1.0), math.hypot(deviation, beside.deviation, beside.spread))
    gains = (log_deviation(choice.gain_low, choice.gain_high) for choice in (old, new))
    return Slowdown(ratio * old.baseline_us / new.baseline_us, math.hypot(*gains, beside.spread))


def _is_timed(choice: ChoiceRecord) -> bool:
    return choice.median_us > 0 and choice.status != "disturbed"


def _is_copy(old: ChoiceRecord, new: ChoiceRecord) -> bool:
    """Say whether the newer tuning took a task's times from the records of the older one."""
    if not _is_timed(old) or not _is_timed(new):
        return old == new and len(old.measurements) > 0
    return (old.winner, old.median_us, old.baseline_us) == (new.winner, new.median_us, new.baseline_us)


def _measured_twice(pairs: Iterable[tuple[_Outcome, _Outcome]]) -> list[tuple[ChoiceRecord, ChoiceRecord]]:
    choices = ((old.choice, new.choice) for old, new in pairs)
    return [
        (old, new)
        for old, new in choices
        if _is_timed(old) and _is_timed(new) and min(old.baseline_us, new.baseline_us) > 0 and not _is_copy(old, new)
    ]


def _reference(pairs: Iterable[tuple[_Outcome, _Outcome]], drift: float, deviation: float) -> _Reference:
    """Choose beside what tasks agree best: their own operators, or all operators' drift."""
    found = _measured_twice(pairs)
    if len(found) < _ENOUGH:
        return _Reference()
    times = [math.log(new.median_us / old.median_us) for old, new in found]
    operators = [math.log(new.baseline_us / old.baseline_us) for old, new in found]
    alone, paired = _spread(times), _spread([t - o for t, o in zip(times, operators, strict=True)])
    return _Reference(drift, deviation, alone) if alone < paired else _Reference(spread=paired)


def _time_deviation(choice: ChoiceRecord) -> float:
    """Return the relative error of the winner's median, from the percentiles of its last timing."""
    timings = [m for m in choice.measurements if m.candidate == choice.winner and m.median_us > 0]
    if not timings:
        return 0.0
    last = next((m for m in reversed(timings) if m.stage in {"final", "guard"}), timings[-1])
    spread = max(last.high_us - last.low_us, 0.0) / _PERCENTILE_WIDTH
    return _MEDIAN_FACTOR * spread / math.sqrt(max(last.samples, 1)) / last.median_us


def _total(parts: Iterable[tuple[float, Slowdown | None]]) -> Slowdown:
    """Return the slowdown of a weighted sum; tasks were measured apart."""
    compared = [(old_us, slowdown) for old_us, slowdown in parts if slowdown is not None]
    old, new = sum(us for us, _ in compared), sum(us * slowdown.ratio for us, slowdown in compared)
    if old <= 0 or new <= 0:
        return Slowdown(1.0, 0.0)
    return Slowdown(new / old, log_deviation_of_sum((us * s.ratio, s.deviation) for us, s in compared))


def _drift(pairs: Iterable[tuple[_Outcome, _Outcome]]) -> tuple[float, float]:
    """Return the median drift of the operators of all tasks that were measured twice, and its logarithm's deviation."""
    logs = [math.log(new.baseline_us / old.baseline_us) for old, new in _measured_twice(pairs)]
    if not logs:
        return 1.0, 0.0
    return math.exp(statistics.median(logs)), _MEDIAN_FACTOR * _spread(logs) / math.sqrt(len(logs))


def _spread(values: Sequence[float]) -> float:
    """Return a standard deviation that a few outliers do not change."""
    median = statistics.median(values)
    return _MAD_FACTOR * statistics.median(abs(value - median) for value in values)


def _changed(old: Artifact, new: Artifact) -> Iterator[Changed]:
    before, after = _facts(old.manifest), _facts(new.manifest)
    for field in dict.fromkeys([*before, *after]):
        values = before.get(field, "absent"), after.get(field, "absent")
        if values[0] != values[1]:
            yield Changed(field, *values)
    sizes = [sum(len(code) for code in artifact.code.values()) for artifact in (old, new)]
    if old.code.keys() != new.code.keys():
        yield Changed(
            "machine code", f"{len(old.code)} kernels, {sizes[0]} bytes", f"{len(new.code)}, {sizes[1]} bytes"
        )


def _facts(manifest: Manifest) -> dict[str, str]:
    """Return what an artifact is, as texts by field."""
    facts = {"tune_model": manifest.tune_model, "schema": str(manifest.schema), "weights": manifest.weights}
    facts |= {f"target.{name}": str(value) for name, value in msgspec.structs.asdict(manifest.target).items()}
    request = manifest.request
    facts |= {"dtype": request.dtype, "task": request.task, "max_length": str(request.max_length)}
    for phase in request.phases:
        facts[f"{phase.name}.weight"] = f"{phase.weight:g}"
        facts |= {f"{phase.name}.{name}": str(list(values)) for name, values in phase.grid.items()}
    facts |= {f"rules.{name}": str(value) for name, value in msgspec.structs.asdict(request.rules).items()}
    return facts
