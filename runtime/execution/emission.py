"""Write a prepared kernel's steps into a slot list: allocate, reinterpret, call, launch, and say what dies where.

A value may be seen in several layouts of the same memory (rows collapsed or not); each view is made at most once, when
somebody needs a tensor of it, and shared by everybody after. Launches need an address only, and any view has it.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch

from tune_model.runtime.errors import TuneModelError
from tune_model.runtime.execution.invoke import PreparedStep, ProgramError, prepare_call, references
from tune_model.runtime.execution.layout import (
    Layout,
    Seen,
    layout_of,
    prepare_alignment,
    prepare_allocation,
    prepare_conform,
    prepare_reinterpret,
)
from tune_model.runtime.launch.counters import LentCounters, prepare_counters
from tune_model.runtime.operators.allowed import is_steady
from tune_model.runtime.program import Call, Form, Parameter

__all__ = ["Emitted", "KernelError", "Operand", "PreparedKernel", "PreparedLaunch", "PreparedWorkspace", "emit"]


class KernelError(TuneModelError):
    """A kernel's launch facts do not fit its form, or a call does not fit the kernel."""


class PreparedLaunch(NamedTuple):
    """A launch that lacks only its memory.

    Attributes:
        names: Slots it touches.
        emit: Makes the step, given the index of each name.
    """

    names: tuple[str, ...]
    emit: Callable[[Callable[[str], int]], PreparedStep]


class PreparedWorkspace(NamedTuple):
    """Scratch memory whose size is settled.

    Attributes:
        name: Slot.
        layout: Of its memory.
        zeroed: Set to zero before every call.
        counters: Zero at the first call and left so by every call.
    """

    name: str
    layout: Layout
    zeroed: bool = False
    counters: bool = False


class PreparedKernel(NamedTuple):
    """A kernel whose sizes are integers and whose code is loaded.

    Attributes:
        form: Concrete.
        steps: In order.
        workspaces: Scratch memory.
        aligned: Strictest alignment asked of each slot, in bytes.
        device: Where it runs.
        lent: Keeps its counters in captures that others make.
    """

    form: Form
    steps: tuple[Call | PreparedLaunch, ...]
    workspaces: tuple[PreparedWorkspace, ...]
    aligned: Mapping[str, int]
    device: torch.device
    lent: LentCounters


class Emitted(NamedTuple):
    """One step of a slot list.

    Attributes:
        run: The step.
        dead: Slots that nothing reads afterwards.
        conforms: For a check of a result's layout whose outcome is the same in every run: the slot it checks.
    """

    run: PreparedStep
    dead: tuple[int, ...] = ()
    conforms: int | None = None


class Operand:
    """A value in a slot list.

    Args:
        layout: In which it is allocated; `None` for a tensor that is passed on as it is (packed weights, temporaries).
        slot: Where it is, if it is made already.

    Attributes:
        views: Slot of every way its memory is seen so far.
        aligned: A kernel's result that the runtime allocates, so it starts at an address that suits every kernel.
    """

    def __init__(self, layout: Layout | None, slot: int | None = None) -> None:
        self.layout = layout
        self.aligned = False
        self.views: dict[Seen | None, int] = {}
        if slot is not None:
            self.views[None if layout is None else layout.seen] = slot

    @property
    def slot(self) -> int:
        """Any slot that starts at its memory."""
        return next(iter(self.views.values()))

    def view(self, layout: Layout, new_slot: Callable[[], int], steps: list[Emitted]) -> int:
        """Return the slot that holds it in a layout, adding the step that makes it so at first use."""
        if self.layout is None:
            return self.slot
        known = self.views.get(layout.seen)
        if known is None:
            source, known = self.slot, new_slot()
            steps.append(Emitted(prepare_reinterpret(source, known, layout)))
            self.views[layout.seen] = known
        return known


class _Emission:
    def __init__(
        self, kernel: PreparedKernel, inputs: Sequence[Operand], results: Sequence[Operand], new_slot: Callable[[], int]
    ) -> None:
        form = kernel.form
        self.kernel = kernel
        self.new_slot = new_slot
        self.steps: list[Emitted] = []
        self.layouts = {p.name: layout_of(p.type) for p in (*form.parameters, *form.results)}
        self.operands = dict(zip((p.name for p in form.parameters), inputs, strict=True))
        self.operands.update(zip((p.name for p in form.results), results, strict=True))
        self.own: dict[str, Operand] = {}
        self.last_use: dict[str, int] = {}

    def temporary(self, name: str, layout: Layout | None = None) -> int:
        """Add a value that dies with the kernel."""
        slot = self.new_slot()
        self.own[name] = self.operands[name] = Operand(layout, slot)
        return slot

    def append(self, run: PreparedStep, names: Sequence[str], conforms: int | None = None) -> None:
        self.steps.append(Emitted(run, (), conforms))
        self.last_use.update(dict.fromkeys(names, len(self.steps) - 1))

    def align(self, parameters: Sequence[Parameter]) -> None:
        """Copy activations that start at the wrong address; a kernel is chosen by where weights and caches start."""
        for parameter in parameters:
            size_bytes = self.kernel.aligned.get(parameter.name, 1)
            operand = self.operands[parameter.name]
            checked = size_bytes > 1 and parameter.role == "activation" and not operand.aligned
            if checked and operand.layout is not None:
                source = operand.view(self.layouts[parameter.name], self.new_slot, self.steps)
                target = self.temporary(parameter.name, self.layouts[parameter.name])
                self.append(prepare_alignment(source, target, size_bytes), [parameter.name])

    def address(self, name: str) -> int:
        """Return a slot whose tensor starts at a name's memory, allocating a result at its first use."""
        operand = self.operands.get(name)
        if operand is None:
            raise KernelError(f"a kernel launches on {name!r}, which is no slot of its form")
        if not operand.views:
            layout = operand.layout or self.layouts[name]
            slot = operand.views[layout.seen] = self.new_slot()
            operand.aligned = True
            self.steps.append(Emitted(prepare_allocation(slot, layout, self.kernel.device)))
        return operand.slot

    def tensor(self, name: str) -> int:
        """Return the slot that holds a name as the form declares it."""
        operand = self.operands.get(name)
        if operand is None or not operand.views:
            raise ProgramError(f"value {name!r} is used before it is made")
        layout = self.layouts.get(name)
        return operand.slot if layout is None else operand.view(layout, self.new_slot, self.steps)

    def call(self, call: Call) -> None:
        names = references([*call.args, *(a for _, a in call.kwargs)])
        slots = {name: self.tensor(name) for name in names}
        made: dict[str, int] = {}
        for name in (name for name in call.results if name is not None):
            layout = self.layouts.get(name)
            if layout is None:
                made[name] = self.temporary(name)
            else:
                made[name] = self.new_slot()
                self.operands[name].views = {layout.seen: made[name]}
                self.operands[name].aligned = False
        self.append(prepare_call(call, slots, self.kernel.device, made), [*names, *made])
        for name, slot in made.items():
            if name in self.layouts:
                steady = slot if is_steady(call.op) else None
                self.append(prepare_conform(slot, self.layouts[name]), [name], steady)

    def finish(self) -> list[Emitted]:
        """Free each temporary after its last use."""
        for parameter in self.kernel.form.results:
            if not self.operands[parameter.name].views:
                raise KernelError(f"a kernel leaves its form's result {parameter.name!r} unmade")
        for name, operand in self.own.items():
            at = self.last_use[name]
            step = self.steps[at]
            self.steps[at] = step._replace(dead=(*step.dead, *operand.views.values()))
        return self.steps


def emit(
    kernel: PreparedKernel, inputs: Sequence[Operand], results: Sequence[Operand], new_slot: Callable[[], int]
) -> list[Emitted]:
    """Make the steps that run a kernel over a slot list.

    Args:
        kernel: What to run.
        inputs: One per parameter of its form; gain the views that are made.
        results: One per result; a result that has a slot already is written there by launches.
        new_slot: Extends the slot list by one.

    Raises:
        KernelError: The kernel does not fit its form.
        ProgramError: A call of it is malformed.
    """
    emission = _Emission(kernel, inputs, results, new_slot)
    emission.align(kernel.form.parameters)
    for name, layout, zeroed, counters in kernel.workspaces:
        slot = emission.temporary(name)
        if counters:
            emission.append(prepare_counters(slot, layout, kernel.device, kernel.lent), [name])
        else:
            emission.append(prepare_allocation(slot, layout, kernel.device, zeroed=zeroed), [name])
    for step in kernel.steps:
        if isinstance(step, Call):
            emission.call(step)
        else:
            for name in step.names:
                emission.address(name)
            emission.append(step.emit(emission.address), step.names)
    return emission.finish()
