"""Under `batch_invariant` a row's result is the same to the last bit, however many other rows there are."""

import pytest
import torch
from devices import cuda_target
from form_runs import fill
from interpreted import interpret
from product_forms import linear

from tune_model.extract.task import NumericRules, Task
from tune_model.tune.candidate import Effort
from tune_model.tune.families import family_named

RULES = NumericRules(batch_invariant=True)


@pytest.mark.parametrize("tail", ["residual", "swiglu"])
@pytest.mark.parametrize("family", ["triton_matmul", "triton_persistent"])
def test_a_row_has_the_same_bits_in_any_batch(family: str, tail: str):
    whole = linear(70, 64, 328, tail=tail)
    inputs = fill(whole)
    configs = list(family_named(family).configurations(Task(whole, RULES), cuda_target(), Effort.BALANCED))
    for config in configs[::9]:
        found = []
        for rows in (70, 33, 1):
            form = linear(rows, 64, 328, tail=tail)
            plan = family_named(family).plan(Task(form, RULES), config)
            fewer = [
                t[:rows].contiguous() if p.role == "activation" else t
                for p, t in zip(form.parameters, inputs, strict=True)
            ]
            (result,) = interpret(plan, form, fewer)
            found.append(result)
        for result in found[1:]:
            assert torch.equal(result, found[0][: len(result)]), config
