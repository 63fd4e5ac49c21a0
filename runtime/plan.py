"""A program at fixed sizes: a flat list of prepared steps over a slot list, every kernel chosen, every lifetime known.

Building a plan costs milliseconds and happens once per shape; running it is a loop over closures.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import msgspec
import torch
from torch import Tensor

from tune_model.runtime.binding import Operand, emit
from tune_model.runtime.coverage import CoverageRow, Outcome, Tally
from tune_model.runtime.dispatch import Choice, Dispatcher, Site, form_label
from tune_model.runtime.expression import evaluate
from tune_model.runtime.invoke import PreparedStep, ProgramError, Slots, prepare_call
from tune_model.runtime.layout import Layout, layout_of, prepare_conform, same
from tune_model.runtime.operators import is_view
from tune_model.runtime.program import Apply, Arg, Call, Items, Program, Ref, bind_call

__all__ = ["Held", "Plan", "build_plan"]


class Held(NamedTuple):
    """A weight or a constant that a program keeps.

    Attributes:
        tensor: On the program's device.
        layout: Of its memory as the program sees it; `None` for a packed or transposed weight.
        kept_as: Layout of a weight that is re-laid out, as kernels name it.
    """

    tensor: Tensor
    layout: Layout | None
    kept_as: str | None = None


class _Expected(NamedTuple):
    """What an operator's result should be, checked when a plan runs for the first time."""

    slot: int
    name: str
    op: str
    layout: Layout
    strided: bool


class Plan:
    """A program's steps at one set of sizes; safe to run from several threads.

    Attributes:
        tally: Counts runs, for coverage.
        inputs: Layout of each input.
    """

    def __init__(
        self,
        inputs: tuple[Layout, ...],
        template: Slots,
        steps: Sequence[tuple[PreparedStep, tuple[int, ...], tuple[_Expected, ...]]],
        outputs: tuple[int, ...],
        tally: Tally,
    ) -> None:
        self.tally = tally
        self.inputs = inputs
        self._outputs = outputs
        self._template = template
        self._steps = [(step, dead) for step, dead, _ in steps]
        self._expected = [expected for _, _, expected in steps]
        self._checked = False

    def run(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        """Run on inputs that are laid out as the program declares them."""
        slots = self._template.copy()
        slots[: len(inputs)] = inputs
        if not self._checked:
            self._run_checked(slots)
        else:
            for step, dead in self._steps:
                step(slots)
                for index in dead:
                    slots[index] = None
        return [slots[index] for index in self._outputs]

    def _run_checked(self, slots: Slots) -> None:
        for (step, dead), expected in zip(self._steps, self._expected, strict=True):
            step(slots)
            for item in expected:
                _check(slots[item.slot], item)
            for index in dead:
                slots[index] = None
        self._checked = True


def _check(value: object, expected: _Expected) -> None:
    if not isinstance(value, Tensor):
        raise ProgramError(f"{expected.op} made a {type(value).__name__} for {expected.name!r}; expected a tensor")
    layout = expected.layout
    if value.dtype != layout.dtype or tuple(value.shape) != layout.shape:
        seen = f"{value.dtype} {tuple(value.shape)}"
        raise ProgramError(f"{expected.op} made {expected.name!r} as {seen}; expected {layout.dtype} {layout.shape}")
    if expected.strided and not same(layout.shape, value.stride(), layout.strides):
        seen = f"strides {value.stride()}"
        raise ProgramError(f"{expected.op} made {expected.name!r} with {seen}; expected {layout.strides}")


def _references(args: Sequence[Arg]) -> list[str]:
    names: list[str] = []
    for arg in args:
        if isinstance(arg, Ref):
            names.append(arg.name)
        elif isinstance(arg, Items):
            names += _references(arg.items)
    return names


def _reads(step: Call | Apply) -> list[str]:
    if isinstance(step, Apply):
        return list(step.inputs)
    return _references([*step.args, *(a for _, a in step.kwargs)])


def _makes(step: Call | Apply) -> list[str]:
    return list(step.outputs) if isinstance(step, Apply) else [name for name in step.results if name is not None]


class _Builder:
    def __init__(
        self,
        program: Program,
        symbols: Mapping[str, int],
        held: Mapping[str, Held],
        dispatcher: Dispatcher,
        device: torch.device,
    ) -> None:
        self.program = program
        self.symbols = dict(symbols)
        self.held = held
        self.dispatcher = dispatcher
        self.device = device
        self.template: Slots = []
        self.slots: dict[str, int] = {}
        self.layouts: dict[str, Layout | None] = {}
        self.steps: list[tuple[PreparedStep, tuple[int, ...], tuple[_Expected, ...]]] = []
        self.rows: dict[CoverageRow, int] = {}

    def new_slot(self, value: Tensor | None = None) -> int:
        self.template.append(value)
        return len(self.template) - 1

    def declare(self, name: str) -> Layout:
        type_ = self.program.values.get(name)
        if type_ is None:
            raise ProgramError(f"program {self.program.name!r} gives no type for value {name!r}")
        layout = self.layouts[name] = layout_of(type_, self.symbols)
        if name not in self.slots:
            self.slots[name] = self.new_slot()
        return layout

    def append(self, steps: Sequence[PreparedStep], dead: Sequence[int], expected: Sequence[_Expected] = ()) -> None:
        """Add steps; what the first one makes is checked before the others use it, values die after the last one."""
        for i, step in enumerate(steps):
            self.steps.append((step, tuple(dead) if i == len(steps) - 1 else (), tuple(expected) if i == 0 else ()))

    def call(self, call: Call, dead: Sequence[int]) -> None:
        made = [(name, self.declare(name)) for name in call.results if name is not None]
        steps = [prepare_call(bind_call(call, self.symbols), self.slots, self.device)]
        view = is_view(call.op)
        if not view:
            steps += [prepare_conform(self.slots[name], layout) for name, layout in made]
        expected = [_Expected(self.slots[name], name, call.op, layout, view) for name, layout in made]
        self.append(steps, dead, expected)

    def apply(self, apply: Apply, dead: Sequence[int]) -> None:
        form = self.dispatcher.form(apply.form)
        if len(apply.inputs) != len(form.parameters) or len(apply.outputs) != len(form.results):
            raise ProgramError(
                f"form {apply.form} is applied to {len(apply.inputs)} inputs, {len(apply.outputs)} outputs"
            )
        dims = tuple(evaluate(d, self.symbols) for d in apply.dims)
        layouts, addresses = [], []
        for parameter, name in zip(form.parameters, apply.inputs, strict=True):
            held = self.held.get(name)
            if held is not None and held.kept_as is not None:
                layouts.append((parameter.name, held.kept_as))
            if held is not None and not held.tensor.is_mkldnn:
                addresses.append((parameter.name, held.tensor.data_ptr() % 256))
        choice = self.dispatcher.choose(Site(apply.form, dims, tuple(layouts), tuple(addresses)))
        inputs = [Operand(self.slot(name), self.layouts[name]) for name in apply.inputs]
        outputs = []
        for name in apply.outputs:
            layout = self.declare(name)
            outputs.append(Operand(self.slots[name], layout))
        steps, temporaries = emit(choice.kernel, inputs, outputs, self.new_slot)
        self.append(steps, [*dead, *temporaries])
        self.count(apply, form_label(form), dims, choice)

    def count(self, apply: Apply, label: str, dims: tuple[int, ...], choice: Choice) -> None:
        entry = choice.selection.entry
        outcome: Outcome = "miss" if entry is None else "exact" if choice.selection.exact else "near"
        shown = entry or choice.nearest
        row = CoverageRow(
            program=self.program.name,
            form=apply.form,
            label=label,
            dims=dims,
            outcome=outcome,
            candidate="" if entry is None else entry.candidate,
            tuned_at=None if shown is None else shown.dims,
            reasons=choice.selection.reasons,
            calls=0,
        )
        self.rows[row] = self.rows.get(row, 0) + 1

    def slot(self, name: str) -> int:
        index = self.slots.get(name)
        if index is None:
            raise ProgramError(f"program {self.program.name!r} uses value {name!r} before it is made")
        return index

    def build(self) -> Plan:
        inputs = tuple(layout_of(item.type, self.symbols) for item in self.program.inputs)
        for item, layout in zip(self.program.inputs, inputs, strict=True):
            self.slots[item.name] = self.new_slot()
            self.layouts[item.name] = layout
        for name, held in self.held.items():
            self.slots[name] = self.new_slot(held.tensor)
            self.layouts[name] = held.layout
        for step, names in zip(self.program.steps, self.last_uses(), strict=True):
            for name in _makes(step):
                self.declare(name)
            dead = [self.slot(name) for name in names]
            if isinstance(step, Apply):
                self.apply(step, dead)
            else:
                self.call(step, dead)
        outputs = tuple(self.slot(output.value) for output in self.program.outputs)
        rows = tuple(msgspec.structs.replace(row, calls=calls) for row, calls in self.rows.items())
        return Plan(inputs, self.template, self.steps, outputs, Tally(rows))

    def last_uses(self) -> list[list[str]]:
        """For every step, the values that nothing reads afterwards."""
        kept = {output.value for output in self.program.outputs} | set(self.held)
        ends: list[list[str]] = []
        for step in reversed(self.program.steps):
            names = [n for n in dict.fromkeys([*_reads(step), *_makes(step)]) if n not in kept]
            kept.update(names)
            ends.append(names)
        return ends[::-1]


def build_plan(
    program: Program,
    symbols: Mapping[str, int],
    held: Mapping[str, Held],
    dispatcher: Dispatcher,
    device: torch.device,
) -> Plan:
    """Prepare a program for one set of sizes.

    Args:
        program: What to run.
        symbols: Value of every symbol.
        held: Weights and constants by value name.
        dispatcher: Chooses kernels.
        device: Where everything lies.

    Raises:
        ProgramError: The program is malformed.
        OperatorError: It calls an operator that is not allowed.
        NotTunedError: The dispatcher is strict and something is not tuned.
    """
    return _Builder(program, symbols, held, dispatcher, device).build()
