"""A tuning without a stopwatch: oneDNN over packed weights wherever it can be, torch's operators elsewhere.

What is tried here is whether models are right, not how fast they are: so artifacts have kernels, weights in another
layout than the checkpoint's, and fallbacks, and nothing is measured for minutes.
"""

from tune_model.extract.task import Plan, PlannedTask
from tune_model.runtime.kernel import Kernel
from tune_model.tune.candidate import Built, Candidate, Effort, Rejected
from tune_model.tune.choice import Choice, Tuning
from tune_model.tune.families.aten import Aten
from tune_model.tune.families.mkldnn_linear import MkldnnLinear
from tune_model.tune.records.database import Finalist
from tune_model.tune.search.layouts import settle_layouts
from tune_model.tune.target import Target

__all__ = ["untimed"]

_EXTERN = Finalist(Candidate("aten"), (), 1.0, 1.0, 1.0, 1.0, 1, unconditional=False)


def untimed(plan: Plan, target: Target) -> Tuning:
    """Choose for every task, settling one layout per weight as the tuner does."""
    built = {task.key: kernel for task in plan.tasks if (kernel := _packed(task, target)) is not None}
    finals = {
        task.key: (_EXTERN, _finalist(*built[task.key])) if task.key in built else (_EXTERN,) for task in plan.tasks
    }
    settled = settle_layouts(plan, finals)
    choices = []
    for task in settled.plan.tasks:
        candidate = settled.winners[task.key].candidate
        ours = candidate.family != "aten"
        kernel = built[task.key][1] if ours else _plain(task, target)
        status = "tuned" if ours else "no gain"
        choices.append(Choice(task.key, candidate, kernel, 1.0, 1.0, 1.0, 1.0, (), (), status))
    return Tuning(settled.plan, target, tuple(choices), {}, 0, 0, 0.0)


def _plain(task: PlannedTask, target: Target) -> Kernel:
    made = Aten().build(task.task, (), target)
    assert isinstance(made, Built)  # noqa: S101 (it rejects nothing)
    return made.kernel


def _packed(task: PlannedTask, target: Target) -> tuple[Candidate, Kernel] | None:
    family = MkldnnLinear()
    if family.accepts(task.task, target) is not None:
        return None
    for config in family.configurations(task.task, target, Effort.QUICK):
        if ("rest", "cpp") in config:
            continue  # a compiler takes a second for each
        built = family.build(task.task, config, target)
        if not isinstance(built, Rejected):
            return Candidate(family.name, config), built.kernel
    return None


def _finalist(candidate: Candidate, kernel: Kernel) -> Finalist:
    return Finalist(candidate, kernel.layouts, 0.5, 2.0, 2.0, 2.0, 1, unconditional=not kernel.requires)
