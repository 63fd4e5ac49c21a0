"""Generated C++ where numbers end: at most twice ATen's error and one unit more, NaN and infinities alike."""

import pytest
import torch
from edge_cases import REGIONS, SHAPES, edges
from family_runs import run
from nearness import assert_near

from tune_model.extract.task import NumericRules, Task
from tune_model.tune.candidate import Built
from tune_model.tune.families import cpp_pointwise, cpp_rows
from tune_model.tune.machine.cpu import probe_cpu

TARGET = probe_cpu()


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("name", REGIONS)
def test_edges(name: str, dtype: str):
    for shape in SHAPES[:1] if dtype == "bfloat16" else SHAPES:
        form = REGIONS[name](*shape, dtype)
        family = cpp_pointwise.FAMILY if form.kind == "pointwise" else cpp_rows.FAMILY
        task = Task(form, NumericRules())
        made = family.build(task, family.start(task, TARGET), TARGET)
        assert isinstance(made, Built), made
        for edge, inputs in edges(form):
            try:
                assert_near(form, inputs, run(made, form, [t.clone() for t in inputs]))
            except AssertionError as error:
                raise AssertionError(f"{name} {shape} {dtype}, {edge}: {error}") from error


def test_no_rows_and_no_columns():
    """A kernel for some rows runs over none; a sum over no columns is ATen's."""
    some, none = (REGIONS["softmax"](rows, 37, "float32") for rows in (5, 0))
    task = Task(some, NumericRules())
    made = cpp_rows.FAMILY.build(task, cpp_rows.FAMILY.start(task, TARGET), TARGET)
    assert isinstance(made, Built)
    assert run(made, none, [torch.empty(0, 37)])[0].shape == (0, 37)
