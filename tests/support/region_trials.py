"""One random region as each generator makes it: which kernel, in which configuration, and what it must compute."""

import math
import random
from typing import NamedTuple

import torch
from form_builder import random_inputs
from nearness import assert_near
from random_forms import random_form

from tune_model.extract.task import NumericRules, Task
from tune_model.runtime.program import Form
from tune_model.runtime.replay import slot_sizes, unmet
from tune_model.tune.candidate import Config, Effort, Rejected
from tune_model.tune.families import triton_pointwise, triton_rows, triton_split_rows
from tune_model.tune.loops.ir import LoopNest
from tune_model.tune.loops.lower import lower
from tune_model.tune.loops.rounding import elide_rounding
from tune_model.tune.target import CudaTarget
from tune_model.tune.triton.launch import KernelPlan
from tune_model.tune.triton.split_source import ends_with_row_values

_FAMILIES = (triton_pointwise.FAMILY, triton_rows.FAMILY, triton_split_rows.FAMILY)

UNITS = 2.0
"""In the last place: a result of few elements may be exact by luck where ATen computes it."""


class Trial(NamedTuple):
    """A region.

    Attributes:
        seed: Of the form, of its inputs, and of the configuration.
        form: Concrete.
        nest: Lowered, without the roundings between calls.
    """

    seed: int
    form: Form
    nest: LoopNest

    def inputs(self) -> list[torch.Tensor]:
        """Return random inputs."""
        return random_inputs(self.form, seed=self.seed)

    def require(self, results: list[torch.Tensor]) -> float:
        """Compare results with ATen's and with float64; returns the largest error as a share of what is allowed."""
        return assert_near(self.form, self.inputs(), results, UNITS)


def trial(seed: int) -> Trial | Rejected:
    """Make and lower a region."""
    form = random_form(seed)
    nest = lower(form)
    if isinstance(nest, Rejected):
        return nest
    assert not [r for r in nest.requires if unmet(r, slot_sizes(form), {})]
    return Trial(seed, form, elide_rounding(nest))


def triton_choice(one: Trial) -> tuple[str, Config]:
    """Return a family and a configuration for a region, by its seed; few programs and steps: they are interpreted."""
    choose = random.Random(one.seed).choice  # noqa: S311 - the same every time
    if one.nest.inner == 0:
        elements = math.prod(axis.size for axis in one.nest.axes)
        block = max(64, _power(elements // choose((2, 5))))
        return "triton_pointwise", (("block", block), ("num_warps", 1), ("pdl", False))
    split = len(one.nest.axes) - one.nest.inner
    rows, width = (math.prod(axis.size for axis in axes) for axes in (one.nest.axes[:split], one.nest.axes[split:]))
    block = max(2, _power(width // choose((1, 1, 2, 4))))
    most = max(1, 8192 // block)
    tile = (("rows", min(most, _power(rows // choose((1, 3, 8))))), ("block", block), ("num_warps", 1))
    loop = (("stages", 1), ("unroll", 1))
    if block >= width or choose((True, False)):
        return "triton_rows", (*tile, *loop, ("pdl", False))
    joins = ends_with_row_values(one.nest, one.form) and choose((True, False))
    return "triton_split_rows", (("splits", choose((2, 3))), *tile, *loop, ("last_joins", joins), ("pdl", False))


def compiled_choice(one: Trial, target: CudaTarget) -> tuple[str, Config]:
    """Return a family and one of the configurations that a tuner would try first, by a region's seed."""
    task = Task(one.form, NumericRules())
    accepting = [family for family in _FAMILIES if family.accepts(task, target) is None]
    family = accepting[one.seed % len(accepting)]
    configs = list(family.configurations(task, target, Effort.QUICK))
    return family.name, configs[one.seed % len(configs)]


def _power(value: int) -> int:
    return 1 << max(0, value - 1).bit_length()


def triton_plan(one: Trial) -> KernelPlan:
    """Return a region's kernel before it is compiled."""
    name, config = triton_choice(one)
    family = next(family for family in _FAMILIES if family.name == name)
    plan = family.plan(Task(one.form, NumericRules()), config)
    assert not isinstance(plan, Rejected), plan
    return plan
