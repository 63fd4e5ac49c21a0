"""Weight layouts: one per weight in the whole artifact, so all tasks that read it must agree.

Weights that are read together (through the same form, or by the same task) form a component. Per group of components
that share tasks the layouts with the lowest total of weight x time win; each task then takes its best candidate under
them. A re-laid-out weight must pay: the plain layout stays unless the total falls by more than a percent.
"""

import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final

import msgspec

from tune_model.extract.task import Plan, PlannedTask
from tune_model.runtime.program import Call, Items, Parameter, Program, Ref, Weight
from tune_model.tune.candidate import Candidate, Rejected
from tune_model.tune.records.database import Finalist
from tune_model.tune.relayout import Layouts, apply_layouts
from tune_model.tune.search.race import select_winner

__all__ = ["Settlement", "settle_layouts"]

PLAIN: Final = ""
"""The layout a weight has when nobody asks for another."""

_MUST_GAIN: Final = 0.99
_PATTERNS_AT_MOST: Final = 1024
"""Combinations of the layouts of one group that are all tried; beyond, one component at a time changes."""

_SWEEPS: Final = 4

Slot = tuple[str, str]
"""A task's or a form's key, and the name of one of its inputs."""


class Settlement(msgspec.Struct, frozen=True):
    """Layouts and what they make of each task.

    Attributes:
        plan: With the layouts written into weights, forms and sites.
        winners: Per task key.
        passed_over: Per task whose fastest candidate lost to a layout that is better for the whole: which, and why.
    """

    plan: Plan
    winners: dict[str, Finalist]
    passed_over: dict[str, tuple[Candidate, Rejected]]


class _Components:
    """Union-find over slots and weights, and which of them must stay plain."""

    def __init__(self) -> None:
        self.parents: dict[Slot, Slot] = {}
        self.pinned: set[Slot] = set()

    def find(self, node: Slot) -> Slot:
        root = node
        while (above := self.parents.setdefault(root, root)) != root:
            root = above
        while node != root:
            self.parents[node], node = root, self.parents[node]
        return root

    def join(self, a: Slot, b: Slot) -> None:
        roots = sorted((self.find(a), self.find(b)))
        self.parents[roots[1]] = roots[0]

    def pin(self, node: Slot) -> None:
        self.pinned.add(node)

    def is_pinned(self, root: Slot) -> bool:
        return any(self.find(node) == root for node in self.pinned)


def settle_layouts(plan: Plan, finals: Mapping[str, Sequence[Finalist]]) -> Settlement:
    """Choose the layout of every weight and with it the winner of every task.

    Args:
        plan: As extracted.
        finals: Per task key its finalists, the extern first. Deterministic: equal finals give equal results.
    """
    components = _connect(plan)
    winners: dict[str, Finalist] = {}
    passed_over: dict[str, tuple[Candidate, Rejected]] = {}
    chosen: dict[Slot, str] = {}
    for group in _groups(plan, finals, components):
        pattern, best = _best_pattern(group, finals, components)
        chosen |= pattern
        winners |= best
    for task in plan.tasks:
        alone = select_winner(finals[task.key])
        winner = winners[task.key]
        if winner.candidate != alone.candidate and winner.layouts != alone.layouts:
            why = f"the weight's layout {winner.layouts or 'plain'} is best for all its readers"
            passed_over[task.key] = (alone.candidate, Rejected("layout", why))
    layouts: dict[str, Layouts] = {}
    for program in plan.programs:
        for key, form in program.forms.items():
            found = ((p.name, chosen.get(components.find((key, p.name)), PLAIN)) for p in form.parameters)
            layouts[key] = tuple((name, layout) for name, layout in found if layout != PLAIN)
    return Settlement(apply_layouts(plan, layouts), winners, passed_over)


def _connect(plan: Plan) -> _Components:
    components = _Components()
    applied = {step.form for program in plan.programs for step in program.steps if not isinstance(step, Call)}
    for program in plan.programs:
        _connect_program(program, components)
        for key in program.forms.keys() - applied:  # for code outside, whose weights are as they are
            for parameter in program.forms[key].parameters:
                components.pin((key, parameter.name))
    for task in plan.tasks:
        for site in task.sites:
            for parameter in task.task.form.parameters:
                components.join((task.key, parameter.name), (site.form, parameter.name))
    return components


def _connect_program(program: Program, components: _Components) -> None:
    """Join weights with the slots that read them; pin what an ATen call or the caller reads as it is.

    A form may read a weight's memory as another type: its transpose (GPT-2), or as a matrix of patches. A layout is
    applied to the weight as the checkpoint has it, so these stay plain.
    """
    nodes = {w.name: _node(w) for w in program.weights}
    types = {w.name: w.type for w in program.weights}
    plain_readers = [output.value for output in program.outputs]
    for step in program.steps:
        if isinstance(step, Call):
            plain_readers += _names(step)
            continue
        for parameter, value in zip(program.forms[step.form].parameters, step.inputs, strict=True):
            slot = (step.form, parameter.name)
            if value in nodes:
                components.join(slot, nodes[value])
            if parameter.role != "weight" or types.get(value) != parameter.type or not _is_matrix(parameter):
                components.pin(slot)
    for value in plain_readers:
        if value in nodes:
            components.pin(nodes[value])


def _groups(plan: Plan, finals: Mapping[str, Sequence[Finalist]], components: _Components) -> list[list[PlannedTask]]:
    """Group tasks that share a component in which there is something to choose."""
    linked = _Components()
    for task in plan.tasks:
        for slot in sorted({slot for f in finals[task.key] for slot, _ in f.layouts}):
            linked.join((task.key, ""), components.find((task.key, slot)))
    # A component with a choice also binds the tasks that read it but have no other layout to offer.
    open_roots = {node for node in linked.parents if node[1] != ""}
    for task in plan.tasks:
        for parameter in task.task.form.parameters:
            root = components.find((task.key, parameter.name))
            if root in open_roots:
                linked.join((task.key, ""), root)
    groups: dict[Slot, list[PlannedTask]] = {}
    for task in plan.tasks:
        groups.setdefault(linked.find((task.key, "")), []).append(task)
    return list(groups.values())


def _best_pattern(
    group: Sequence[PlannedTask], finals: Mapping[str, Sequence[Finalist]], components: _Components
) -> tuple[dict[Slot, str], dict[str, Finalist]]:
    options: dict[Slot, set[str]] = {}
    for task in group:
        for finalist in finals[task.key]:
            for slot, layout in finalist.layouts:
                options.setdefault(components.find((task.key, slot)), {PLAIN}).add(layout)
    roots = sorted(options)
    choices = [[PLAIN] if components.is_pinned(r) else sorted(options[r]) for r in roots]
    plain = dict.fromkeys(roots, PLAIN)
    best_pattern, (best_cost, best) = plain, _evaluate(group, plain, finals, components)
    limit = best_cost * _MUST_GAIN

    def cost_of(pattern: Mapping[Slot, str]) -> float:
        return _evaluate(group, pattern, finals, components)[0]

    if math.prod(len(choice) for choice in choices) <= _PATTERNS_AT_MOST:
        patterns = [dict(zip(roots, values, strict=True)) for values in itertools.product(*choices)]
    else:
        patterns = [_descend(roots, choices, cost_of)]
    for pattern in patterns:
        cost, winners = _evaluate(group, pattern, finals, components)
        if cost < min(limit, best_cost):
            best_pattern, best_cost, best = pattern, cost, winners
    return best_pattern, best


def _descend(
    roots: Sequence[Slot], choices: Sequence[Sequence[str]], cost_of: Callable[[Mapping[Slot, str]], float]
) -> dict[Slot, str]:
    """Change one component's layout after another to its best given the others, until none changes.

    For groups with more components than can be tried in every combination; costs grow with their number only.
    """
    pattern = dict.fromkeys(roots, PLAIN)
    best = cost_of(pattern)
    for _ in range(_SWEEPS):
        before = dict(pattern)
        for root, choice in zip(roots, choices, strict=True):
            for layout in choice:
                changed = {**pattern, root: layout}
                cost = cost_of(changed)
                if cost < best:
                    pattern, best = changed, cost
        if pattern == before:
            break
    return pattern


def _evaluate(
    group: Sequence[PlannedTask],
    pattern: Mapping[Slot, str],
    finals: Mapping[str, Sequence[Finalist]],
    components: _Components,
) -> tuple[float, dict[str, Finalist]]:
    """Return the cost of a pattern and each task's winner under it; infinite when a task has no candidate for it."""
    winners: dict[str, Finalist] = {}
    fitting: dict[str, list[Finalist]] = {}
    for task in group:
        wanted = {
            (p.name, layout)
            for p in task.task.form.parameters
            if (layout := pattern.get(components.find((task.key, p.name)), PLAIN)) != PLAIN
        }
        fits = [f for f in finals[task.key] if set(f.layouts) == wanted]
        if not fits:
            return math.inf, {}
        fitting[task.key] = fits
        winners[task.key] = select_winner(fits) if not wanted else min(fits, key=lambda f: (f.median_us, f.complexity))
    packed = {layout for layout in pattern.values() if layout not in {PLAIN, "transposed"}}
    if packed and not _keep_fallback(group, winners, fitting):
        return math.inf, {}
    return sum(task.weight * winners[task.key].median_us for task in group), winners


def _keep_fallback(
    group: Sequence[PlannedTask], winners: dict[str, Finalist], fitting: Mapping[str, Sequence[Finalist]]
) -> bool:
    """Make sure that every form with a packed weight has an entry that is legal at any size.

    The form's body cannot read a packed weight, so one grid point takes an unconditional kernel where that costs least.
    A form without dims has no other sizes, so its one kernel is enough.
    """
    forms = sorted({site.form for task in group for site in task.sites if winners[task.key].layouts})
    for form in forms:
        tasks = [task for task in group if any(site.form == form for site in task.sites)]
        if any(winners[task.key].unconditional for task in tasks):
            continue
        if all(not site.dims for task in tasks for site in task.sites if site.form == form):
            continue
        swaps = [
            (task.weight * (f.median_us - winners[task.key].median_us), task.key, f)
            for task in tasks
            for f in fitting[task.key]
            if f.unconditional
        ]
        if not swaps:
            return False
        _, key, finalist = min(swaps, key=lambda swap: swap[:2])
        winners[key] = finalist
    return True


def _node(weight: Weight) -> Slot:
    """Identify a weight across programs: the same sources through the same transforms are the same memory."""
    return ("weight", msgspec.json.encode([weight.sources, weight.transforms]).decode())


def _is_matrix(parameter: Parameter) -> bool:
    return len(parameter.type.shape) == 2


def _names(call: Call) -> Iterable[str]:
    waiting = [*call.args, *(value for _, value in call.kwargs)]
    while waiting:
        arg = waiting.pop()
        if isinstance(arg, Ref):
            yield arg.name
        elif isinstance(arg, Items):
            waiting += arg.items
