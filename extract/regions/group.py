"""Groups a rewritten program into regions and writes them as applications of forms.

Who comes first and why, in one place:

1. Attention: nothing else may take its operands' append, and its order to other steps on the cache is fixed.
2. Matmuls take the pointwise work behind them: their output tile is in registers anyway, so an epilogue is free, and a
   bias, activation or residual otherwise costs a pass over memory. They come before reductions, so a residual sum
   between a projection and a norm belongs to the projection, unless it is asked for the other grouping.
3. Reductions take the pointwise work before and after on the same rows: one pass over memory instead of one per step.
4. Pointwise chains are made of what is left.

Whatever fits nowhere stays an ATen call. Views are no steps of their own in any of this; those that are still read by a
call or start elsewhere than what they are a view of are emitted before their first reader.
"""

from collections.abc import Iterator
from itertools import product
from typing import NamedTuple

import msgspec

from tune_model.extract.layout import VIEWS
from tune_model.extract.regions.attention import form_attention
from tune_model.extract.regions.matmul import form_matmuls
from tune_model.extract.regions.partition import Formed, Partition
from tune_model.extract.regions.pointwise import form_pointwise
from tune_model.extract.regions.reduction import form_reductions
from tune_model.extract.regions.vocabulary import why_not
from tune_model.extract.rewrite.graph import refs
from tune_model.extract.task import Skipped
from tune_model.runtime.program import Apply, Form, Program, Step, fingerprint

__all__ = ["USUAL", "Grouped", "Grouping", "group", "other_groupings"]


class Grouping(NamedTuple):
    """Which of two regions takes the steps that both could.

    Attributes:
        sums_with_norms: A residual sum belongs to the norm behind it instead of the projection before it.
        heads_with_attention: What makes one token's queries and keys belongs to its attention over the cache.
    """

    sums_with_norms: bool = False
    heads_with_attention: bool = False

    def __str__(self) -> str:
        """Say what differs from the usual grouping."""
        parts = ("residual sums with the norms", "rotary embedding within the attention")
        return " and ".join(text for text, differs in zip(parts, self, strict=True) if differs) or "as usual"


USUAL = Grouping()


def other_groupings(widest: Grouping) -> Iterator[Grouping]:
    """Yield every grouping but the usual one that differs from it in no more than `widest` does."""
    for chosen in product(*((False, True) if differs else (False,) for differs in widest)):
        if any(chosen):
            yield Grouping(*chosen)


class Grouped(NamedTuple):
    """A program with forms, and the calls that stayed outside."""

    program: Program
    skipped: tuple[Skipped, ...]


def group(program: Program, grouping: Grouping = USUAL) -> Grouped:
    """Form all regions of a rewritten program.

    Args:
        program: Rewritten.
        grouping: Who takes what two regions could.
    """
    partition = Partition(program)
    form_attention(partition, with_heads=grouping.heads_with_attention)
    form_matmuls(partition, leave_sums=grouping.sums_with_norms)
    form_reductions(partition)
    form_pointwise(partition)
    return _Assembler(program, partition).run()


class _Assembler:
    """Writes the steps in the order of their positions, views just before who needs them."""

    def __init__(self, program: Program, partition: Partition) -> None:
        self.program = program
        self.partition = partition
        self.graph = partition.graph
        self.steps: list[Step] = []
        self.forms: dict[str, Form] = {}
        self.emitted: set[str] = set()
        self.skipped: dict[tuple[str, str], int] = {}

    def run(self) -> Grouped:
        at = {f.position: f for f in self.partition.formed}
        members = {i for f in self.partition.formed for i in f.members}
        for index, step in enumerate(self.graph.steps):
            formed = at.get(index)
            if formed is not None:
                self._apply(formed)
            elif index not in members and step.op not in VIEWS:
                for name in refs(step):
                    self._need(name)
                self.steps.append(step)
                key = (step.op, why_not(step, self.partition.misfits.get(index)))
                self.skipped[key] = self.skipped.get(key, 0) + 1
        for output in self.program.outputs:
            self._need(output.value)
        made = {r for s in self.steps for r in (s.outputs if isinstance(s, Apply) else s.results) if r is not None}
        program = msgspec.structs.replace(
            self.program,
            forms=dict(sorted(self.forms.items())),
            steps=tuple(self.steps),
            values={n: t for n, t in self.program.values.items() if n in made},
        )
        skipped = tuple(Skipped(program.name, op, count, reason) for (op, reason), count in self.skipped.items())
        return Grouped(program, skipped)

    def _apply(self, formed: Formed) -> None:
        form = formed.canonical.form
        key = fingerprint(form)
        self.forms[key] = form
        inputs = tuple(formed.region.operands[i].value for i in formed.canonical.operands)
        outputs = tuple(formed.region.results[i] for i in formed.canonical.results)
        for name in inputs:
            self._need(name)
        self.steps.append(Apply(key, inputs, outputs, formed.canonical.dims))

    def _need(self, name: str) -> None:
        """Emit the views that lead to a value, unless they are there."""
        for value in reversed(self.partition.chain(name)[:-1]):
            if value not in self.emitted:
                self.emitted.add(value)
                self.steps.append(self.graph.steps[self.graph.producer[value]])
