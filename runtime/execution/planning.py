"""Turn a program at fixed sizes into a plan: choose every kernel, lay out the slot list, end every lifetime.

Costs milliseconds, once per set of sizes.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import msgspec
import torch
from torch import Tensor

from tune_model.runtime.coverage import CoverageRow, Outcome, Tally
from tune_model.runtime.execution.dispatch import Choice, Dispatcher, Site, form_label
from tune_model.runtime.execution.emission import Emitted, Operand, emit
from tune_model.runtime.execution.invoke import ProgramError, Slots, prepare_call, references
from tune_model.runtime.execution.layout import Layout, layout_of, prepare_conform
from tune_model.runtime.execution.plan import Expected, Plan, PlannedStep
from tune_model.runtime.expression import evaluate
from tune_model.runtime.operators.allowed import is_steady, is_view
from tune_model.runtime.program import Apply, Call, Form, Program, bind_call

__all__ = ["Held", "build_plan"]


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


def _reads(step: Call | Apply) -> list[str]:
    if isinstance(step, Apply):
        return list(step.inputs)
    return references([*step.args, *(a for _, a in step.kwargs)])


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
        cache_alignment: int,
    ) -> None:
        self.program = program
        self.symbols = dict(symbols)
        self.held = held
        self.dispatcher = dispatcher
        self.device = device
        self.cache_address = cache_alignment % 256
        self.template: Slots = []
        self.operands: dict[str, Operand] = {}
        self.steps: list[PlannedStep] = []
        self.rows: dict[CoverageRow, int] = {}
        self.read_by_calls = {output.value for output in program.outputs}
        self.read_by_calls.update(n for step in program.steps if isinstance(step, Call) for n in _reads(step))

    def new_slot(self, value: Tensor | None = None) -> int:
        self.template.append(value)
        return len(self.template) - 1

    def declared(self, name: str) -> Layout:
        type_ = self.program.values.get(name)
        if type_ is None:
            raise ProgramError(f"program {self.program.name!r} gives no type for value {name!r}")
        return layout_of(type_, self.symbols)

    def operand(self, name: str) -> Operand:
        operand = self.operands.get(name)
        if operand is None:
            raise ProgramError(f"program {self.program.name!r} uses value {name!r} before it is made")
        return operand

    def tensor(self, name: str) -> int:
        """Return the slot that holds a value as the program declares it."""
        operand = self.operand(name)
        if name not in self.program.values:
            return operand.slot  # inputs, weights and constants are there as declared
        steps: list[Emitted] = []
        slot = operand.view(self.declared(name), self.new_slot, steps)
        self.steps += [PlannedStep(step) for step in steps]
        return slot

    def call(self, call: Call) -> None:
        slots = {name: self.tensor(name) for name in _reads(call)}
        made = [(name, self.declared(name)) for name in _makes(call)]
        for name, layout in made:
            slots[name] = self.new_slot()
            self.operands[name] = Operand(layout, slots[name])
        view = is_view(call.op)
        expected = tuple(Expected(slots[name], name, call.op, layout, view) for name, layout in made)
        run = prepare_call(bind_call(call, self.symbols), slots, self.device)
        self.steps.append(PlannedStep(Emitted(run), expected))
        if not view:  # a view shares memory that others may write to, so it is never copied
            for name, layout in made:
                steady = slots[name] if is_steady(call.op) else None
                self.steps.append(PlannedStep(Emitted(prepare_conform(slots[name], layout), (), steady)))

    def apply(self, apply: Apply) -> None:
        form = self.dispatcher.form(apply.form)
        if len(apply.inputs) != len(form.parameters) or len(apply.outputs) != len(form.results):
            raise ProgramError(
                f"form {apply.form} is applied to {len(apply.inputs)} inputs, {len(apply.outputs)} outputs"
            )
        dims = tuple(evaluate(d, self.symbols) for d in apply.dims)
        choice = self.dispatcher.choose(self.site(apply, form, dims))
        concrete = choice.kernel.form
        for parameter, name in zip(concrete.parameters, apply.inputs, strict=True):
            self.reinterpret_held(name, layout_of(parameter.type))
        inputs = [self.operand(name) for name in apply.inputs]
        outputs = []
        for parameter, name in zip(concrete.results, apply.outputs, strict=True):
            # Launches write where the tensor is read next: by other forms, or by the program's own calls.
            layout = self.declared(name) if name in self.read_by_calls else layout_of(parameter.type)
            outputs.append(Operand(layout))
            self.operands[name] = outputs[-1]
        self.steps += [PlannedStep(step) for step in emit(choice.kernel, inputs, outputs, self.new_slot)]
        self.count(apply, form_label(form), dims, choice)

    def site(self, apply: Apply, form: Form, dims: tuple[int, ...]) -> Site:
        layouts, addresses = [], []
        for parameter, name in zip(form.parameters, apply.inputs, strict=True):
            held = self.held.get(name)
            if held is not None and held.kept_as is not None:
                layouts.append((parameter.name, held.kept_as))
            if held is not None and not held.tensor.is_mkldnn:
                addresses.append((parameter.name, held.tensor.data_ptr() % 256))
            if parameter.role == "cache":
                addresses.append((parameter.name, self.cache_address))
        return Site(apply.form, dims, tuple(layouts), tuple(addresses))

    def reinterpret_held(self, name: str, layout: Layout) -> None:
        """See a weight as a form does, now rather than at every run."""
        held = self.held.get(name)
        if held is not None and held.layout is not None and layout.seen not in self.operands[name].views:
            slot = self.new_slot(held.tensor.as_strided(layout.shape, layout.strides))
            self.operands[name].views[layout.seen] = slot

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

    def build(self) -> Plan:
        inputs = tuple(layout_of(item.type, self.symbols) for item in self.program.inputs)
        for item, layout in zip(self.program.inputs, inputs, strict=True):
            self.operands[item.name] = Operand(layout, self.new_slot())
        for name, held in self.held.items():
            self.operands[name] = Operand(held.layout, self.new_slot(held.tensor))
        for step, last in zip(self.program.steps, self.last_uses(), strict=True):
            if isinstance(step, Apply):
                self.apply(step)
            else:
                self.call(step)
            self.free(last)
        outputs = tuple(self.tensor(output.value) for output in self.program.outputs)
        rows = tuple(msgspec.structs.replace(row, calls=calls) for row, calls in self.rows.items())
        tally = Tally(rows, self.program.name, tuple(sorted(self.symbols.items())))
        return Plan(inputs, self.template, self.steps, outputs, tally)

    def free(self, names: Sequence[str]) -> None:
        """Let values die after the step that was added last."""
        dead = tuple(slot for name in names for slot in self.operand(name).views.values())
        if dead:
            (run, others, conforms), expected = self.steps[-1]
            self.steps[-1] = PlannedStep(Emitted(run, (*others, *dead), conforms), expected)

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
    cache_alignment: int,
) -> Plan:
    """Prepare a program for one set of sizes.

    Args:
        program: What to run.
        symbols: Value of every symbol.
        held: Weights and constants by value name.
        dispatcher: Chooses kernels.
        device: Where everything lies.
        cache_alignment: A power of two of which the address of every cache input is a multiple. Caches are written in
            place, so kernels that ask for more are not chosen.

    Raises:
        ProgramError: The program is malformed.
        OperatorError: It calls an operator that is not allowed.
        NotTunedError: The dispatcher is strict and something is not tuned.
    """
    return _Builder(program, symbols, held, dispatcher, device, cache_alignment).build()
