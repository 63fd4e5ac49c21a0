"""The library over a weight stored as its transpose: who may have it, and that the values are the same."""

import pytest
import torch
from devices import cuda_target
from form_runs import fill, relative_error, run_body
from product_forms import batched, linear, matrices, product

from tune_model.extract.task import NumericRules, Task
from tune_model.runtime.execution.binding import bind_kernel
from tune_model.runtime.program import Form
from tune_model.tune.candidate import Built, Rejected
from tune_model.tune.families.aten_transposed import FAMILY
from tune_model.tune.relayout import relaid_form, relay

HOPPER = cuda_target(90)


@pytest.mark.parametrize(
    "form",
    [linear(7, 32, 48, "float32", tail=tail) for tail in ("", "bias", "residual", "gelu", "swiglu")]
    + [product(7, 32, 48)],
)
def test_the_body_computes_the_same_from_the_transpose(form: Form):
    task = Task(form, NumericRules())
    assert FAMILY.accepts(task, HOPPER) is None
    built = FAMILY.build(task, FAMILY.start(task, HOPPER), HOPPER)
    assert isinstance(built, Built)
    ((slot, layout),) = built.kernel.layouts
    assert layout == "transposed"
    inputs = fill(form)
    turned = relay(form, tuple(inputs), built.kernel.layouts)
    relaid = relaid_form(form, built.kernel.layouts)
    place = [p.name for p in form.parameters].index(slot)
    assert turned[place].stride() == (1, turned[place].shape[0])
    results = bind_kernel(built.kernel, relaid, {}, torch.device("cpu"))(turned)
    exact = run_body(form, [t.double() for t in inputs])
    assert all(relative_error(a, e) < 1e-6 for a, e in zip(results, exact, strict=True))


@pytest.mark.parametrize(
    ("form", "why"), [(batched(2, 3, 4, 5), "no weight"), (matrices(3, 4, 5, None, None), "no weight")]
)
def test_only_a_plain_weight_can_be_turned(form: Form, why: str):
    refused = FAMILY.accepts(Task(form, NumericRules()), HOPPER)
    assert isinstance(refused, Rejected)
    assert why in refused.detail
