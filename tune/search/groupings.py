"""Which grouping of the programs' steps into regions is the faster one: the sum of weighted times decides.

A grouping is a plan of its own with tasks of its own; what both have in common was raced once. The grouping that
extract prefers stays unless another gains more than a percent, like a weight's plain layout.
"""

from collections.abc import Mapping, Sequence
from typing import Final

import msgspec

from tune_model.extract.task import Plan
from tune_model.tune.records.database import Finalist
from tune_model.tune.search.layouts import settle_layouts

__all__ = ["choose_grouping"]

_MUST_GAIN: Final = 0.99


def choose_grouping(plan: Plan, finals: Mapping[str, Sequence[Finalist]]) -> Plan:
    """Return the plan or the one of its rivals whose winners take the least time, without rivals, and noted why.

    Args:
        plan: As extracted.
        finals: Per key of every task whose race has an outcome its finalists, the extern first. A grouping that lacks
            one of its tasks is not compared. Deterministic: equal finals give equal results.
    """
    best = alone = msgspec.structs.replace(plan, rivals=())
    preferred_us = _weighted_us(alone, finals)
    if preferred_us is None or not plan.rivals:
        return alone
    best_us = preferred_us
    notes: list[str] = []
    for rival in plan.rivals:
        us = _weighted_us(rival.plan, finals)
        if us is None:
            continue
        gain = preferred_us / us
        notes.append(f"grouped otherwise ({rival.what}) all tasks together are {gain:.3f}x as fast")
        if us < min(best_us, preferred_us * _MUST_GAIN):
            best, best_us = rival.plan, us
    chosen = next((rival.what for rival in plan.rivals if rival.plan is best), "as usual")
    if notes:
        notes.append(f"grouping chosen: {chosen}")
    return msgspec.structs.replace(best, notes=(*best.notes, *notes))


def _weighted_us(plan: Plan, finals: Mapping[str, Sequence[Finalist]]) -> float | None:
    """Return the weighted sum of a plan's winners under the best layouts; `None` when a race has no outcome."""
    if any(task.key not in finals for task in plan.tasks):
        return None
    winners = settle_layouts(plan, {task.key: finals[task.key] for task in plan.tasks}).winners
    return sum(task.weight * winners[task.key].median_us for task in plan.tasks)
