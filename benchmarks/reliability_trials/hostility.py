"""Hostile candidates between good ones: each is rejected for what it did, and the good ones do not notice.

The same tasks are tuned without them, with them, and without them again; the runs share built kernels but no times. A
good candidate's gain over the extern, measured in the same rounds, is the same in all, as far as its intervals tell.

And directly: a good candidate is timed, a hostile one is tried, the good one is timed again, for every kind of kernel.
As often it is timed twice with nothing between, which says what the machine's noise is.
"""

import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from bench.plans import plan_of
from bench.run import Bench, attempt

from reliability_trials.forms import linear
from reliability_trials.hostile import KERNEL_KINDS, KINDS, GoodFamily, HostileFamily
from reliability_trials.hostile_cuda import CUDA_KERNEL_KINDS, CUDA_KINDS, HostileCudaFamily
from reliability_trials.processes import MARK, marked, new_mark
from tune_model.extract.task import Plan
from tune_model.tune.building.pool import Job, build
from tune_model.tune.candidate import Built, Candidate, Effort, Family
from tune_model.tune.choice import Choice, Tuning
from tune_model.tune.device import Bench as Task_
from tune_model.tune.device import Passed, Samples
from tune_model.tune.families import families_for
from tune_model.tune.measuring.interval import Ratio, percentile
from tune_model.tune.measuring.policy import policy_for
from tune_model.tune.measuring.worker import DeviceWorker
from tune_model.tune.options import TuneOptions
from tune_model.tune.records.database import Outcome, Records
from tune_model.tune.target import CudaTarget
from tune_model.tune.tuner import tune_with
from tune_model.tune.workshop import Workshop

__all__ = ["SHARD", "run_hostility"]

SHARD: Final = "hostile"

_NOISE: Final = 0.1
"""Gains on a shared machine move this much between runs of the same tune: intervals are widened by it."""

_STEP_S: Final = 10.0
_BUILD_S: Final = 20.0
_MEMORY: Final = 4 << 30


def run_hostility(bench: Bench, sizes: Sequence[tuple[int, int, int]]) -> None:
    """Race good and hostile candidates over linear layers (rows, n, k) in float32, and write a row for each kind."""
    on_gpu = isinstance(bench.shop.target, CudaTarget)
    kinds = CUDA_KINDS if on_gpu else KINDS
    names = [*kinds, "good candidates", "later timings"]
    if not any(bench.wants(SHARD, name) for name in names):
        return
    found: dict[str, Any] = {}

    def race() -> Mapping[str, Any]:
        found.update(_race(bench, sizes, on_gpu=on_gpu))
        return found["good"]  # type: ignore[no-any-return]

    if attempt(bench, SHARD, "good candidates", race) is None:
        return
    for kind, expected in kinds.items():
        seen = found["reasons"].get(kind, [])
        row = bench.ledger.record(SHARD, kind, {"expected": expected, "found": sorted(set(seen)), "tasks": len(seen)})
        bench.tell(f"  {kind}: {', '.join(row['found']) or 'not rejected'} (expected {expected})")
    attempt(bench, SHARD, "later timings", lambda: _later(bench, sizes[0], on_gpu=on_gpu))


def _race(bench: Bench, sizes: Sequence[tuple[int, int, int]], *, on_gpu: bool) -> dict[str, Any]:
    plan = plan_of([linear(*size) for size in sizes])
    hostile: Family = HostileCudaFamily() if on_gpu else HostileFamily()
    real = families_for(bench.shop.target)
    good = real if on_gpu else (*real, GoodFamily(count=2))
    between = (good[0], hostile, *good[1:])  # hostile ones come before most good ones
    runs = {name: _tune(bench, plan, families, name) for name, families in
            (("before", good), ("with", between), ("after", good))}  # fmt: skip
    reasons: dict[str, list[str]] = {}
    for choice in runs["with"][0].choices:
        for candidate, rejected in choice.rejections:
            if candidate.family == hostile.name:
                reasons.setdefault(str(dict(candidate.config)["kind"]), []).append(rejected.reason)
    gains = {name: gains for name, (_, gains, _, _) in runs.items()}
    usual = _moved(gains["before"], gains["after"])
    moved = _moved(gains["before"], gains["with"])
    chosen = [choice.winner.family for choice in runs["with"][0].choices]
    return {
        "reasons": reasons,
        "good": {
            "tasks": len(sizes),
            "gains_compared": moved[0],
            "gains_moved": moved[1],
            "gains_compared_without": usual[0],
            "gains_moved_without": usual[1],
            "hostile_winners": chosen.count(hostile.name),
            "replaced_processes": runs["with"][2],
            "orphans": sum(len(left) for _, _, _, left in runs.values()),
        },
    }


def _later(bench: Bench, size: tuple[int, int, int], *, on_gpu: bool) -> Mapping[str, Any]:
    """Time the extern before and after each hostile kernel, and as often with nothing between."""
    target = bench.shop.target
    task = plan_of([linear(*size)]).tasks[0].task
    hostile: Family = HostileCudaFamily() if on_gpu else HostileFamily()
    extern = families_for(target)[0]
    baseline = build(Job(extern, task, extern.start(task, target), target))
    if not isinstance(baseline, Built):
        raise AssertionError(f"the extern does not build: {baseline}")
    policy = policy_for(target, 0)
    device = DeviceWorker(target, step_s=_STEP_S, memory_bytes=None if on_gpu else _MEMORY)

    def median_us() -> float:
        found = device.time(Candidate(extern.name), baseline, policy.final)
        if not isinstance(found, Samples):
            raise AssertionError(f"the extern cannot be timed: {found}")
        return percentile(found.us, 0.5)

    def ratio(between: Callable[[], object]) -> float:
        before = median_us()
        between()
        return median_us() / before

    usual: list[float] = []
    later: dict[str, float] = {}
    try:
        opened = device.open(Task_(task, policy, baseline, 3))
        if not isinstance(opened, Passed):
            raise AssertionError(f"the task does not open: {opened}")
        for kind in CUDA_KERNEL_KINDS if on_gpu else KERNEL_KINDS:
            built = hostile.build(task, (("kind", kind),), target)
            if not isinstance(built, Built):
                raise AssertionError(f"{kind} does not build: {built}")
            candidate = Candidate(hostile.name, (("kind", kind),))
            usual.append(ratio(lambda: None))
            later[kind] = ratio(lambda c=candidate, b=built: device.check(c, b))  # type: ignore[misc]
    finally:
        device.close()
    noise = max(max(r, 1 / r) for r in usual) * (1 + _NOISE)
    moved = [kind for kind, r in later.items() if max(r, 1 / r) > noise]
    return {
        "ratios": {kind: round(r, 4) for kind, r in later.items()},
        "ratios_without": [round(r, 4) for r in usual],
        "noise": noise,
        "moved": len(moved),
        "moved_by": moved,
    }


Gains = dict[tuple[str, Candidate], Ratio]


def _tune(bench: Bench, plan: Plan, families: tuple[Family, ...], name: str) -> tuple[Tuning, Gains, int, list[int]]:
    """Tune with records of its own.

    Returns:
        What it found, gains in the finals, how often the device's process was replaced, and processes that are left.
    """
    folder = bench.shop.folder / f"hostile-{name}"
    shutil.rmtree(folder, ignore_errors=True)
    environment = new_mark()
    os.environ[MARK] = environment[MARK]
    device = DeviceWorker(bench.shop.target, step_s=_STEP_S, memory_bytes=None if _on_gpu(bench) else _MEMORY)
    options = TuneOptions(
        folder / "records.sqlite",
        bench.shop.folder / "hostile-kernels",
        Effort.QUICK,
        build_workers=bench.shop.workers,
        build_timeout_s=_BUILD_S,
    )
    try:
        tuning = tune_with(plan, Workshop(families, bench.shop.target, device, options, lambda _event: None))
        left = [pid for pid in marked(environment) if pid != os.getpid() and not _is_tracker(pid)]
    finally:
        del os.environ[MARK]
    return tuning, _gains(folder / "records.sqlite", tuning.choices), device.replaced, left


def _on_gpu(bench: Bench) -> bool:
    return isinstance(bench.shop.target, CudaTarget)


def _is_tracker(pid: int) -> bool:
    """Python's own process that watches shared resources, which lives as long as this one."""
    from multiprocessing import resource_tracker

    return pid == getattr(resource_tracker._resource_tracker, "_pid", None)


def _gains(path: Any, choices: Sequence[Choice]) -> Gains:
    records = Records(path)
    tasks = {choice.task for choice in choices}
    found: Gains = {}
    try:
        for row in records.rows():
            if isinstance(row.body, Outcome) and row.task in tasks:
                for finalist in row.body.finalists[1:]:
                    ratio = Ratio(finalist.gain, finalist.gain_low, finalist.gain_high)
                    found[row.task, finalist.candidate] = ratio
    finally:
        records.close()
    return found


def _moved(before: Gains, after: Gains) -> tuple[int, int]:
    """Return how many candidates were in both finals, and how many of them moved beyond the noise."""
    both = before.keys() & after.keys()
    apart = [
        key
        for key in both
        if before[key].low > after[key].high * (1 + _NOISE) or after[key].low > before[key].high * (1 + _NOISE)
    ]
    return len(both), len(apart)
