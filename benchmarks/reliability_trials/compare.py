"""Two artifacts of one plan: where their choices differ, both are timed in the same rounds.

A task that other processes kept either tune from deciding has no choice to compare: it says so itself (`disturbed`).
"""

from pathlib import Path
from typing import Any, Final

from tune_model.package.format.records import ChoiceRecord, TaskRecord
from tune_model.package.read import open_artifact
from tune_model.tune.building.pool import Job, build
from tune_model.tune.candidate import Built, Candidate, Rejected
from tune_model.tune.device import Bench, Passed, Samples
from tune_model.tune.families import families_for, family_named
from tune_model.tune.measuring.interval import paired_ratio
from tune_model.tune.measuring.policy import policy_for
from tune_model.tune.measuring.worker import DeviceWorker
from tune_model.tune.target import Target

__all__ = ["compare_choices"]

_NOISE: Final = 0.05
"""Two tunes may choose kernels this much apart: they are told apart by no more than that on a shared machine."""

_ROUNDS: Final = 3


def compare_choices(first: Path, second: Path, target: Target) -> dict[str, Any]:
    """Compare winners task by task.

    Returns:
        `tasks`; how many are `undecided` in either; `same` choices of the others; `worst_ratio`: second / first, of the
        lower ends of the intervals, so above 1 the second is surely slower; and `beyond_noise`: how many are surely
        slower by more than the noise.
    """
    choices = [_choices(path) for path in (first, second)]
    tasks = _tasks(first)
    worst, beyond, same, undecided = 1.0, 0, 0, 0
    device = DeviceWorker(target)
    try:
        for key, planned in tasks.items():
            made = choices[0][key], choices[1][key]
            if any(choice.status == "disturbed" for choice in made):
                undecided += 1
                continue
            pair = made[0].winner, made[1].winner
            if pair[0] == pair[1]:
                same += 1
                continue
            ratio = min(_slower(device, planned.planned.task, target, pair) for _ in range(_ROUNDS))
            worst = max(worst, ratio)
            beyond += ratio > 1.0 + _NOISE
    finally:
        device.close()
    return {
        "tasks": len(tasks),
        "undecided": undecided,
        "same": same,
        "worst_ratio": worst,
        "beyond_noise": beyond,
    }


def _tasks(path: Path) -> dict[str, TaskRecord]:
    return {r.planned.key: r for r in open_artifact(path).records() if isinstance(r, TaskRecord)}


def _choices(path: Path) -> dict[str, ChoiceRecord]:
    return {r.task: r for r in open_artifact(path).records() if isinstance(r, ChoiceRecord)}


def _slower(device: DeviceWorker, task: Any, target: Target, pair: tuple[Candidate, Candidate]) -> float:
    """Return how much slower the second surely is: the lower end of the interval of second / first."""
    baseline_family = families_for(target)[0]
    baseline = _built(Job(baseline_family, task, baseline_family.start(task, target), target))
    entries = tuple((c, _built(Job(family_named(c.family), task, c.config, target))) for c in pair)
    policy = policy_for(target, 0)
    opened = device.open(Bench(task, policy, baseline, 11))
    if not isinstance(opened, Passed):
        raise AssertionError(f"the task does not open: {opened}")
    try:
        for entry in entries:
            checked = device.check(*entry)
            if isinstance(checked, Rejected) and entry[0].family != baseline_family.name:
                raise AssertionError(f"a choice is rejected: {checked}")
        extern = Candidate(baseline_family.name, baseline_family.start(task, target))
        distinct = [entry for entry in entries if entry[0] != extern]
        times = device.compare(((extern, baseline), *distinct), policy.final)
        if isinstance(times, Rejected):
            raise AssertionError(f"the choices cannot be timed: {times}")
        found = dict(zip([extern, *(c for c, _ in distinct)], times, strict=True))
        first, second = found[pair[0]], found[pair[1]]
        if not (isinstance(first, Samples) and isinstance(second, Samples)):
            raise AssertionError(f"a choice cannot be timed: {first}, {second}")
        return paired_ratio(second.us, first.us).low
    finally:
        device.finish()


def _built(job: Job) -> Built:
    made = build(job)
    if isinstance(made, Rejected):
        raise AssertionError(f"a choice no longer builds: {made}")
    return made
