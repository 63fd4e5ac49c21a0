"""Generated Triton where numbers end: at most twice ATen's error and one unit more, NaN and infinities alike."""

import numpy as np
import pytest
import torch
from edge_cases import REGIONS, SHAPES, edges
from interpreted import interpret
from nearness import assert_near

from tune_model.extract.task import NumericRules, Task
from tune_model.runtime.program import Form
from tune_model.tune.candidate import Config, Rejected
from tune_model.tune.families import triton_pointwise, triton_rows, triton_split_rows
from tune_model.tune.triton.split_source import ends_with_row_values

FIXED = (("num_warps", 1), ("stages", 1), ("unroll", 1))


def kernels(form: Form) -> list[tuple[object, Config]]:
    """Whole rows, a loop and a split; a chain has one way only."""
    if form.kind == "pointwise":
        return [(triton_pointwise.FAMILY, (("block", 256), ("num_warps", 1), ("pdl", False)))]
    width = form.parameters[0].type.shape[1]
    made: list[tuple[object, Config]] = [
        (triton_rows.FAMILY, (("rows", 8), ("block", 64), *FIXED, ("pdl", False))),
    ]
    if width > 16:
        nest = triton_rows.rows_of(form)
        assert not isinstance(nest, Rejected)
        last = ends_with_row_values(nest, form)
        made.append((triton_rows.FAMILY, (("rows", 8), ("block", 16), *FIXED, ("pdl", False))))
        split = (("splits", 2), ("rows", 8), ("block", 16), *FIXED, ("last_joins", last), ("pdl", False))
        made.append((triton_split_rows.FAMILY, split))
    return made


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("name", REGIONS)
def test_edges(name: str, dtype: str):
    for shape in SHAPES[:2] if dtype == "float16" else SHAPES[:1]:
        form = REGIONS[name](*shape, dtype)
        for family, config in kernels(form):
            plan = family.plan(Task(form, NumericRules()), config)
            for edge, inputs in edges(form):
                with np.errstate(all="ignore"):
                    results = interpret(plan, form, [t.clone() for t in inputs])
                try:
                    assert_near(form, inputs, results)
                except AssertionError as error:
                    msg = f"{name} {shape} {dtype}, {edge}, {family.name} {config[:3]}: {error}"
                    raise AssertionError(msg) from error


def test_no_rows():
    """A kernel for some rows is not launched for none."""
    some, none = (REGIONS["softmax"](rows, 37, "float32") for rows in (5, 0))
    plan = triton_rows.FAMILY.plan(Task(some, NumericRules()), kernels(some)[0][1])
    assert not isinstance(plan, Rejected)
    assert interpret(plan, none, [torch.empty(0, 37)])[0].shape == (0, 37)
