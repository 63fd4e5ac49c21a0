"""Batch invariance: a row of a matmul's result does not depend on how many other rows there are.

Libraries choose kernels by the number of rows, and kernels add in different orders, so the same prompt may get other
last bits in another batch. A tile of a Triton kernel adds along k in one order for every row, wherever it lies and
however many there are. So where the rules ask for it only such kernels compete, and one configuration serves a form at
every size: the one with the lowest weighted sum of times.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Final, NamedTuple

from tune_model.extract.task import Plan, PlannedTask, Task
from tune_model.runtime.errors import TuneModelError
from tune_model.tune.candidate import Candidate, Rejected

__all__ = [
    "NoInvariantKernelError",
    "RaceTimes",
    "is_bound",
    "refuse_variant",
    "served_at_every_size",
    "settle_invariant",
]

_FAMILIES: Final = frozenset({"triton_matmul", "triton_persistent"})
"""Whose configurations, where the rules ask for it, all add along k in an order of their own, and are the same at every
size of a form."""


class NoInvariantKernelError(TuneModelError):
    """A matmul has no kernel that is invariant at all its sizes."""


class RaceTimes(NamedTuple):
    """What one race says.

    Attributes:
        times_us: Of every candidate that was timed, its longest timing's median, in microseconds.
        refused: Families that do not accept the task, and why.
    """

    times_us: Mapping[Candidate, float]
    refused: Sequence[tuple[Candidate, Rejected]]


def is_bound(task: Task) -> bool:
    """Say whether a task's kernel must be invariant."""
    return task.rules.batch_invariant and task.form.kind == "matmul"


def refuse_variant(task: Task, family: str) -> Rejected | None:
    """Say why a family may not compete where rows must not depend on their number; `None` where it may."""
    if not is_bound(task) or family in _FAMILIES:
        return None
    return Rejected("variant", "a row's last bits may depend on the number of rows")


def settle_invariant(plan: Plan, entries: Mapping[str, RaceTimes]) -> dict[str, Candidate]:
    """Choose one candidate for all tasks of a form that are bound.

    Args:
        plan: As extracted.
        entries: Per key of a bound task.

    Returns:
        Per key of a bound task its candidate. Equal entries give equal choices.

    Raises:
        NoInvariantKernelError: No candidate was right and timed at every size of some form.
    """
    chosen: dict[str, Candidate] = {}
    for group in _groups([task for task in plan.tasks if is_bound(task.task)]):
        common = [
            candidate
            for candidate in entries[group[0].key].times_us
            if candidate.family in _FAMILIES and all(candidate in entries[task.key].times_us for task in group)
        ]
        if not common:
            raise _none(group, entries)

        def cost(candidate: Candidate, group: Sequence[PlannedTask] = group) -> float:
            return sum(task.weight * entries[task.key].times_us[candidate] for task in group)

        best = min(common, key=cost)
        chosen |= dict.fromkeys((task.key for task in group), best)
    return chosen


def served_at_every_size(plan: Plan, confirmed: Collection[str]) -> frozenset[str]:
    """Return the bound tasks among `confirmed` whose form has no other: a kernel for some sizes is no promise."""
    groups = _groups([task for task in plan.tasks if is_bound(task.task)])
    whole = [group for group in groups if all(task.key in confirmed for task in group)]
    return frozenset(task.key for group in whole for task in group)


def _groups(tasks: Sequence[PlannedTask]) -> list[list[PlannedTask]]:
    """Group tasks that share a form, directly or through others."""
    groups: list[tuple[set[str], list[PlannedTask]]] = []
    for task in tasks:
        forms, members = {site.form for site in task.sites}, [task]
        apart: list[tuple[set[str], list[PlannedTask]]] = []
        for other, found in groups:
            if other & forms:
                forms, members = other | forms, [*found, *members]
            else:
                apart.append((other, found))
        groups = [*apart, (forms, members)]
    return [members for _, members in groups]


def _none(group: Sequence[PlannedTask], entries: Mapping[str, RaceTimes]) -> NoInvariantKernelError:
    reasons = dict.fromkeys(
        f"{candidate.family}: {rejected.detail}"
        for task in group
        for candidate, rejected in entries[task.key].refused
        if candidate.family in _FAMILIES
    )
    labels = ", ".join(task.label for task in group)
    why = "; ".join(reasons) or "none was right and timed at every size"
    return NoInvariantKernelError(
        f"search.batch_invariant: no kernel gives the rows of {labels} the same values at every size ({why}); "
        "tune for a CUDA device, in float32, float16 or bfloat16, without a budget, or switch it off"
    )
