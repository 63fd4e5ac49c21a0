"""How fast the machine can go, judged by the best that anything reached in this run, and the floor that follows.

No data sheet: a roof is the highest rate at which any task was seen to move bytes or to compute. So there is no table
of machines, and what counts is what this one gave. A task's floor is the least time its bytes and operations take at
these rates, never more than the time it was seen to take.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Literal, NamedTuple

import msgspec

from tune_model.extract.task import PlannedTask
from tune_model.tune.target import CudaTarget, Target

__all__ = ["Attained", "Roofs", "floor_us", "limited_by", "make_roofs", "task_dtype"]


class Attained(NamedTuple):
    """A task and the shortest time any implementation of it took."""

    planned: PlannedTask
    best_us: float


class Roofs(msgspec.Struct, frozen=True):
    """The best rates seen.

    Attributes:
        bytes_per_us: Of tasks that no cache can hold, if there is one; else of all.
        from_cache: No task was larger than the last-level cache, so `bytes_per_us` is a cache's rate.
        memory_task: Label of the task that reached it.
        flops_per_us: By dtype, of matmuls and attention.
        compute_tasks: By dtype, label of the task that reached it.
    """

    bytes_per_us: float
    from_cache: bool
    memory_task: str
    flops_per_us: dict[str, float]
    compute_tasks: dict[str, str]


def task_dtype(planned: PlannedTask) -> str:
    """Return the element type a task computes with: that of its first floating-point input."""
    form = planned.task.form
    found = (p.type.dtype for p in (*form.parameters, *form.results) if "float" in p.type.dtype)
    return next(found, form.results[0].type.dtype if form.results else "float32")


def make_roofs(attained: Sequence[Attained], target: Target) -> Roofs:
    """Return the best rates among tasks that have a time."""
    timed = [a for a in attained if a.best_us > 0]
    cache = target.l2_bytes if isinstance(target, CudaTarget) else target.l3_bytes or target.l2_bytes
    large = [a for a in timed if a.planned.size_bytes > cache]
    memory = _fastest(large or timed, lambda a: a.planned.size_bytes / a.best_us)
    by_dtype: dict[str, list[Attained]] = {}
    for item in timed:
        if item.planned.task.form.kind in {"matmul", "attention"}:
            by_dtype.setdefault(task_dtype(item.planned), []).append(item)
    best = {dtype: _fastest(items, lambda a: a.planned.flops / a.best_us) for dtype, items in sorted(by_dtype.items())}
    return Roofs(
        bytes_per_us=memory[0],
        from_cache=not large,
        memory_task=memory[1],
        flops_per_us={dtype: rate for dtype, (rate, _) in best.items() if rate > 0},
        compute_tasks={dtype: name for dtype, (rate, name) in best.items() if rate > 0},
    )


def floor_us(planned: PlannedTask, roofs: Roofs, best_us: float) -> float:
    """Return the least time a task can take at the best rates seen; at most `best_us`, which was seen."""
    memory, compute = _times(planned, roofs)
    return min(max(memory, compute), best_us)


def limited_by(planned: PlannedTask, roofs: Roofs) -> Literal["memory", "compute"]:
    """Say which roof a task meets first."""
    memory, compute = _times(planned, roofs)
    return "memory" if memory >= compute else "compute"


def _times(planned: PlannedTask, roofs: Roofs) -> tuple[float, float]:
    memory = planned.size_bytes / roofs.bytes_per_us if roofs.bytes_per_us else 0.0
    rate = roofs.flops_per_us.get(task_dtype(planned), 0.0)
    return memory, planned.flops / rate if rate else 0.0


def _fastest(items: Iterable[Attained], rate: Callable[[Attained], float]) -> tuple[float, str]:
    best = (0.0, "")
    for item in items:
        if rate(item) > best[0]:
            best = (rate(item), item.planned.label)
    return best
