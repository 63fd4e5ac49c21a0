"""What a run will cost before it starts, from the plan alone: candidates, seconds, and how much a program reads."""

from typing import Final

import msgspec

from tune_model.extract.cost import type_bytes
from tune_model.extract.task import Plan, PlannedTask, all_tasks
from tune_model.tune.candidate import Effort, Family
from tune_model.tune.search.descent import expected_climbs, expected_count
from tune_model.tune.target import CudaTarget, Target

__all__ = [
    "Estimate",
    "TaskEstimate",
    "call_us",
    "estimate",
    "estimate_seconds",
    "floor_us",
    "is_hot",
    "program_bytes",
    "survey_seconds",
]

_TASK_S: Final = {"cuda": 0.8, "cpu": 0.4}
"""Inputs, reference and final of one task (H200 and a 2-core server, 2026-11)."""

_GUARD_S: Final = {"cuda": 0.5, "cpu": 0.3}
"""The same for its winner once more, against the extern alone."""

_MEASURE_S: Final = {"cuda": 0.015, "cpu": 0.05}
_BUILD_S: Final = {"cuda": 0.5, "cpu": 0.2}


_HOT_FLOPS_PER_BYTE: Final = 150
"""An H200 does some 180 operations while it reads a byte."""


class TaskEstimate(msgspec.Struct, frozen=True):
    """How many candidates compete for a task; where a family's are climbed, a part of them is timed."""

    task: str
    candidates: int


class Estimate(msgspec.Struct, frozen=True):
    """What tuning a plan will take.

    Attributes:
        tasks: In the plan's order, then those that only its rivals have.
        seconds: Wall time with nothing in the records.
    """

    tasks: tuple[TaskEstimate, ...]
    seconds: float


def estimate(plan: Plan, target: Target, families: tuple[Family, ...], effort: Effort, build_workers: int) -> Estimate:
    """Count candidates and guess the time; needs no device."""
    tasks: list[TaskEstimate] = []
    timed = 0
    ahead = isinstance(target, CudaTarget)
    for planned in all_tasks(plan):
        kind = planned.task.form.kind
        about = [f for f in families if kind in f.kinds]
        accepting = [f for f in about if f.accepts(planned.task, target) is None]
        counts = [len(set(f.configurations(planned.task, target, effort))) for f in accepting]
        tasks.append(TaskEstimate(planned.key, sum(counts)))
        timed += sum(expected_count(kind, count, builds_ahead=ahead) for count in counts)
        timed += expected_climbs(kind, effort, builds_ahead=ahead)
    seconds = estimate_seconds(target, len(tasks), timed, build_workers)
    return Estimate(tuple(tasks), seconds)


def estimate_seconds(target: Target, tasks: int, candidates: int, build_workers: int) -> float:
    """Guess the wall time of races; on a GPU builds overlap measuring, on a CPU they come first."""
    kind = "cuda" if isinstance(target, CudaTarget) else "cpu"
    building = candidates * _BUILD_S[kind] / max(build_workers, 1)
    measuring = candidates * _MEASURE_S[kind] + tasks * (_TASK_S[kind] + _GUARD_S[kind])
    return max(building, measuring) if kind == "cuda" else building + measuring


def survey_seconds(target: Target, tasks: int) -> float:
    """Guess the wall time of timing the externs alone."""
    return 0.5 * tasks * _TASK_S["cuda" if isinstance(target, CudaTarget) else "cpu"]


def call_us(planned: PlannedTask, target: Target) -> float:
    """Guess a call's time before anything is measured, to begin with the tasks where most of it goes."""
    if isinstance(target, CudaTarget):
        bytes_per_us, flops_per_us, launch_us = 2e6, 3e8, 3.0
    else:
        bytes_per_us, flops_per_us, launch_us = 1e4, 2e4 * target.threads, 5.0
    return launch_us + max(planned.size_bytes / bytes_per_us, planned.flops / flops_per_us)


def is_hot(planned: PlannedTask) -> bool:
    """Say whether arithmetic bounds a task, so that a GPU's clocks follow its power while it runs."""
    return planned.flops >= _HOT_FLOPS_PER_BYTE * max(1, planned.size_bytes)


def floor_us(planned: PlannedTask, target: Target) -> float:
    """Return a time that no kernel for a task beats: its traffic and its operations at more than a machine can do."""
    if isinstance(target, CudaTarget):
        bytes_per_us, flops_per_us, launch_us = 5e6, 1e9, 1.0
    else:
        bytes_per_us, flops_per_us, launch_us = 2e4 * target.threads, 1e5 * target.threads, 0.5
    return launch_us + max(planned.size_bytes / bytes_per_us, planned.flops / flops_per_us)


def program_bytes(plan: Plan) -> dict[str, int]:
    """Return how many bytes of weights one step of each program reads."""
    return {p.name: sum(type_bytes(w.type) for w in p.weights) for p in plan.programs}
