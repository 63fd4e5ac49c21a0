"""Loops that make two reductions in one pass, and rows that several programs share."""

import math

import pytest
import torch
from form_builder import FormBuilder, random_inputs
from interpreted import interpret
from loop_catalogue import FORMS
from nearness import assert_near

from tune_model.extract.task import NumericRules, Task
from tune_model.runtime.expression import evaluate
from tune_model.runtime.program import Form
from tune_model.runtime.replay import slot_sizes
from tune_model.tune.candidate import Rejected
from tune_model.tune.families import triton_rows, triton_split_rows
from tune_model.tune.triton.launch import Launch
from tune_model.tune.triton.split_source import ends_with_row_values

FIXED = {"num_warps": 1, "stages": 1, "unroll": 1, "pdl": False}
LOOPED = [{"rows": r, "block": b, **FIXED} for r, b in ((1, 16), (8, 8))]
SPLIT = [{"splits": s, "rows": r, "block": b, **FIXED} for s, r, b in ((2, 1, 16), (3, 8, 8))]


def check(form: Form, inputs: list[torch.Tensor]) -> None:
    nest = triton_rows.rows_of(form)
    assert not isinstance(nest, Rejected), nest
    joins = [False, True] if ends_with_row_values(nest, form) else [False, False]
    split = [{**config, "last_joins": last} for config, last in zip(SPLIT, joins, strict=True)]
    for family, configs in ((triton_rows.FAMILY, LOOPED), (triton_split_rows.FAMILY, split)):
        for values in configs:
            plan = family.plan(Task(form, NumericRules()), tuple(values.items()))
            assert not isinstance(plan, Rejected), plan
            assert_near(form, inputs, interpret(plan, form, [t.clone() for t in inputs]))


def rows(*, columns: int = 37) -> torch.Tensor:
    """Rows with what floats can hold, and rows that lie far from zero."""
    x = torch.randn(9, columns, generator=torch.Generator().manual_seed(3))
    x[1, 30] = math.nan
    x[2, 5] = math.inf
    x[3, 7] = x[3, 33] = math.inf
    x[4] = -math.inf
    x[5, 3:] = -math.inf
    x[6] += 1000.0
    x[7] *= 30.0
    x[8, ::2] = -1e30
    return x


def single(op: str, *arguments: object, shape: tuple[int, ...] = (9, 37), **keywords: object) -> Form:
    b = FormBuilder("reduction")
    return b.form(b.call(op, b.input(shape), *arguments, **keywords))


@pytest.mark.parametrize("op", ["softmax.int", "log_softmax.int", "argmax.default", "argmin.default"])
def test_along_rows_of_infinities_and_nan(op: str):
    check(single(op, -1), [rows()])


@pytest.mark.parametrize("op", ["logsumexp.default", "amax.default", "amin.default", "sum.dim_IntList", "mean.dim"])
def test_one_value_per_row(op: str):
    check(single(op, [-1]), [rows()])


def test_variance_far_from_zero_is_not_lost():
    """Sums of squares would have no digit left at 1e4 around 1."""
    x = rows()[:8]
    x[0] = 1e4 + torch.randn(37, generator=torch.Generator().manual_seed(4)) * 1e-1
    check(single("var.correction", [-1], correction=1, shape=(8, 37)), [x])
    check(single("std.correction", [-1], correction=0, shape=(8, 37)), [x])


def test_mean_and_variance_together():
    b = FormBuilder("reduction")
    x = b.input((2, 37))
    check(b.form(*b.call("var_mean.correction", x, [-1], results=2)), [rows()[6:8]])


def test_layer_norm_and_the_sum_before_it():
    b = FormBuilder("reduction")
    x, y, w, c = b.input((5, 37)), b.input((5, 37)), b.input((37,)), b.input((37,))
    total = b.call("add.Tensor", x, y)
    form = b.form(total, b.call("layer_norm.default", total, [37], w, c, 1e-5))
    check(form, random_inputs(form))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_halves(dtype: str):
    b = FormBuilder("reduction")
    x = b.input((3, 37), dtype)
    form = b.form(b.call("softmax.int", x, -1), b.call("argmax.default", x, -1), b.call("var.correction", x, [-1]))
    check(form, random_inputs(form))


def test_a_reduction_of_what_a_reduction_gave():
    """Three passes: the norm of a softmax of a norm."""
    b = FormBuilder("reduction")
    x = b.input((4, 37))
    normed = b.call("rms_norm.default", x, [37], None, 1e-6)
    soft = b.call("softmax.int", normed, -1)
    form = b.form(b.call("rms_norm.default", soft, [37], None, 1e-6), b.call("amax.default", soft, [-1]))
    check(form, random_inputs(form))


@pytest.mark.parametrize("op", ["any.dim", "all.dim", "prod.dim_int"])
def test_truth_and_products(op: str):
    form = single(op, -1)
    x = torch.randn(9, 37, generator=torch.Generator().manual_seed(5)) * 0.1 + 1
    x[2, 34] = 0
    x[3] = 0
    check(form, [x])


def test_integers():
    b = FormBuilder("reduction")
    x = b.input((4, 37), "int64")
    form = b.form(b.call("amax.default", x, [-1]), b.call("argmin.default", x, -1), b.call("sum.dim_IntList", x, [-1]))
    check(form, random_inputs(form))


def test_leading_dims_are_reduced_across_memory():
    b = FormBuilder("reduction")
    x = b.input((90, 12))
    form = b.form(b.call("sum.dim_IntList", x, [0]), b.call("var.correction", x, [0]), b.call("argmax.default", x, 0))
    check(form, random_inputs(form))


@pytest.mark.parametrize("name", ["statistics ends", "group norm", "channel norm", "softmax float32", "positions"])
def test_the_catalogue(name: str):
    form = FORMS[name]()
    check(form, random_inputs(form))


def test_no_program_is_without_columns():
    """37 columns in blocks of 4 are 10 blocks: 6 splits would take 2 blocks each, so only 5 are made."""
    wanted = (("softmax.int", False, [5, 5]), ("argmax.default", False, [5, 1]), ("argmax.default", True, [5]))
    for op, last, launches in wanted:
        form = single(op, -1)
        config = {"splits": 6, "rows": 1, "block": 4, **FIXED, "last_joins": last}
        plan = triton_split_rows.FAMILY.plan(Task(form, NumericRules()), tuple(config.items()))
        assert not isinstance(plan, Rejected)
        assert [step.grid[1] for step in plan.launches if isinstance(step, Launch)] == launches
        assert [evaluate(w.size, slot_sizes(form)) for w in plan.workspaces] == [9 * 5] * 2 + [9] * last
        assert [w.counters for w in plan.workspaces] == [False, False] + [True] * last
