"""A program at fixed sizes: a flat list of prepared steps over a slot list. Running it is a loop over closures."""

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from tune_model.runtime.coverage import Tally
from tune_model.runtime.execution.emission import Emitted
from tune_model.runtime.execution.invoke import PreparedStep, ProgramError, Slots
from tune_model.runtime.execution.layout import Layout, is_contiguous, same

__all__ = ["Expected", "Plan", "PlannedStep"]


class Expected(NamedTuple):
    """What an operator's result should be.

    Attributes:
        slot: Where it is.
        name: The value, for messages.
        op: What made it.
        layout: Its declared type.
        strided: Its strides must be as declared: nothing brings them into order.
    """

    slot: int
    name: str
    op: str
    layout: Layout
    strided: bool


class PlannedStep(NamedTuple):
    """A step, and what it must have made when it runs for the first time."""

    emitted: Emitted
    expected: tuple[Expected, ...] = ()


class Plan:
    """A program's steps at one set of sizes; safe to run from several threads.

    The first run checks every operator's results against their declared types. Checks of layouts whose outcome cannot
    change are dropped after it, if they found nothing to do.

    Args:
        inputs: Layout of each input.
        template: The slot list before a run: weights and constants in place.
        steps: In order.
        outputs: Slot of each output.
        tally: Counts runs, for coverage.

    Attributes:
        contiguous: Whether each input is row-major.
    """

    def __init__(
        self,
        inputs: tuple[Layout, ...],
        template: Slots,
        steps: Sequence[PlannedStep],
        outputs: tuple[int, ...],
        tally: Tally,
    ) -> None:
        self.tally = tally
        self.inputs = inputs
        self.contiguous = tuple(is_contiguous(layout) for layout in inputs)
        self._outputs = outputs
        self._template = template
        self._planned = steps
        self._steps: list[tuple[PreparedStep, tuple[int, ...]]] | None = None

    def run(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        """Run on inputs that are laid out as the program declares them."""
        slots = self._template.copy()
        slots[: len(inputs)] = inputs
        if self._steps is None:
            self._steps = self._run_checked(slots)
        else:
            for step, dead in self._steps:
                step(slots)
                for slot in dead:
                    slots[slot] = None
        return [slots[slot] for slot in self._outputs]

    def _run_checked(self, slots: Slots) -> list[tuple[PreparedStep, tuple[int, ...]]]:
        """Run once and return the steps that later runs need."""
        needed: list[tuple[PreparedStep, tuple[int, ...]]] = []
        for (step, dead, conforms), expected in self._planned:
            before = None if conforms is None else slots[conforms]
            step(slots)
            for item in expected:
                _check(slots[item.slot], item)
            if conforms is None or slots[conforms] is not before:
                needed.append((step, dead))
            elif dead:
                last, others = needed[-1]
                needed[-1] = (last, (*others, *dead))
            for slot in dead:
                slots[slot] = None
        return needed


def _check(value: object, expected: Expected) -> None:
    if not isinstance(value, Tensor):
        raise ProgramError(f"{expected.op} made a {type(value).__name__} for {expected.name!r}; expected a tensor")
    layout = expected.layout
    if value.dtype != layout.dtype or tuple(value.shape) != layout.shape:
        seen = f"{value.dtype} {tuple(value.shape)}"
        raise ProgramError(f"{expected.op} made {expected.name!r} as {seen}; expected {layout.dtype} {layout.shape}")
    if expected.strided and not same(layout.shape, value.stride(), layout.strides):
        seen = f"strides {value.stride()}"
        raise ProgramError(f"{expected.op} made {expected.name!r} with {seen}; expected {layout.strides}")
