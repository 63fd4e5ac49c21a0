"""What extract hands to tune: the programs of a model and the unique tasks with how often each runs.

Types only. A `Task` is a concrete form (`bind_form` at one grid point) plus the numeric rules it must respect; its key
is the same whatever model, layer, phase or transformers version it came from.
"""

import hashlib

import msgspec

from tune_model.runtime.program import Form, Program

__all__ = ["NumericRules", "Plan", "PlannedTask", "Rival", "Site", "Skipped", "Task", "all_tasks", "task_key"]


class NumericRules(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a candidate may do to the numbers; part of a task's key.

    Attributes:
        allow_tf32: float32 matmuls may round their operands to tf32.
        allow_nondeterministic: Two runs may differ in the last bits (atomic split-K).
        batch_invariant: A row of a matmul's result must not depend on how many rows there are.
    """

    allow_tf32: bool = False
    allow_nondeterministic: bool = False
    batch_invariant: bool = False


class Task(msgspec.Struct, frozen=True):
    """One concrete thing to tune.

    Attributes:
        form: Concrete: `dims` is empty and every size an integer.
        rules: What a candidate may do to the numbers.
    """

    form: Form
    rules: NumericRules


def task_key(task: Task) -> str:
    """Return 24 hex digits of the SHA-256 of the task's canonical JSON."""
    return hashlib.sha256(msgspec.json.encode(task, order="deterministic")).hexdigest()[:24]


class Site(msgspec.Struct, frozen=True):
    """Where a task occurs: `occurrences` steps of `program` apply `form` with these dims at this grid point."""

    program: str
    point: tuple[tuple[str, int], ...]
    form: str
    dims: tuple[int, ...]
    occurrences: int


class PlannedTask(msgspec.Struct, frozen=True):
    """A unique task of a model.

    Attributes:
        key: `task_key(task)`.
        label: For people: `matmul 1x4096x28672 bf16 + swiglu`.
        sites: Every place it occurs in.
        weight: Sum over sites of occurrences times the phase's weight / its number of grid points.
        flops: Floating-point operations of one call.
        size_bytes: Least traffic of one call: every input read once, every output written once.
    """

    key: str
    label: str
    task: Task
    sites: tuple[Site, ...]
    weight: float
    flops: int
    size_bytes: int


class Skipped(msgspec.Struct, frozen=True):
    """A step that stays an ATen call, and why."""

    program: str
    op: str
    count: int
    reason: str


class Plan(msgspec.Struct, frozen=True):
    """Everything extract found.

    Attributes:
        programs: One per phase.
        tasks: Unique, heaviest first.
        skipped: What is not tuned.
        notes: Which rung of the tracing ladder was used for each phase, and what was patched or merged.
        rivals: The same programs with other regions; tuning chooses one grouping, and what it returns has none.
    """

    programs: tuple[Program, ...]
    tasks: tuple[PlannedTask, ...]
    skipped: tuple[Skipped, ...]
    notes: tuple[str, ...]
    rivals: tuple["Rival", ...] = ()


class Rival(msgspec.Struct, frozen=True):
    """Another grouping of a plan's programs.

    Attributes:
        what: Differs, for people: `decode: residual sums with the norms`.
        plan: Complete, of the same phases and weights.
    """

    what: str
    plan: Plan


def all_tasks(plan: Plan) -> tuple[PlannedTask, ...]:
    """Return a plan's tasks, then those that only its rivals have, each once."""
    found = {task.key: task for task in plan.tasks}
    for rival in plan.rivals:
        for task in rival.plan.tasks:
            found.setdefault(task.key, task)
    return tuple(found.values())
