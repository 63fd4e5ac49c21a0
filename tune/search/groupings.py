"""Which grouping of the programs' steps into regions is the faster one: the sum of weighted times decides.

A grouping is a plan of its own with tasks of its own; what both have in common was raced once. The grouping that
extract prefers stays unless another gains more than a percent of what the regions that differ take.
"""

from collections.abc import Mapping, Sequence
from typing import Final

import msgspec

from tune_model.extract.task import Plan
from tune_model.tune.records.database import Finalist
from tune_model.tune.search.layouts import settle_layouts

__all__ = ["choose_grouping"]

_MUST_GAIN: Final = 0.01

Costs = dict[str, float]
"""Weighted microseconds by task key."""


def choose_grouping(plan: Plan, finals: Mapping[str, Sequence[Finalist]]) -> Plan:
    """Return the plan or the one of its rivals whose winners take the least time, without rivals, and noted why.

    Args:
        plan: As extracted.
        finals: Per key of every task whose race has an outcome its finalists, the extern first. A grouping that lacks
            one of its tasks is not compared. Deterministic: equal finals give equal results.
    """
    usual = msgspec.structs.replace(plan, rivals=())
    costs = _costs(usual, finals)
    if costs is None or not plan.rivals:
        return usual
    best, most_us, chosen = usual, 0.0, "as usual"
    notes: list[str] = []
    for rival in plan.rivals:
        others = _costs(rival.plan, finals)
        if others is None:
            continue
        saved_us = sum(costs.values()) - sum(others.values())
        own_us = _apart(costs, others)
        gain = own_us / max(own_us - saved_us, 1e-9)
        notes.append(f"grouped otherwise ({rival.what}), the regions that differ are {gain:.3f}x as fast")
        if saved_us > max(most_us, _MUST_GAIN * own_us):
            best, most_us, chosen = rival.plan, saved_us, rival.what
    if notes:
        notes.append(f"grouping chosen: {chosen}")
    return msgspec.structs.replace(best, notes=(*best.notes, *notes))


def _costs(plan: Plan, finals: Mapping[str, Sequence[Finalist]]) -> Costs | None:
    """Return what a plan's winners take under the best layouts; `None` when a race has no outcome."""
    if any(task.key not in finals for task in plan.tasks):
        return None
    winners = settle_layouts(plan, {task.key: finals[task.key] for task in plan.tasks}).winners
    return {task.key: task.weight * winners[task.key].median_us for task in plan.tasks}


def _apart(costs: Costs, others: Costs) -> float:
    """Return what the first plan spends on what the second does not do as often, or not in the same way."""
    return sum(us - min(us, others.get(key, 0.0)) for key, us in costs.items())
