"""A merged gate and up projection as two library matmuls and one generated kernel, with launch facts as at run time."""

import pytest
from devices import cuda_target
from form_builder import FormBuilder
from form_runs import fill, relative_error, run_body
from interpreted import interpret
from product_forms import linear

from tune_model.extract.task import NumericRules, Task
from tune_model.runtime.program import Form
from tune_model.tune.candidate import Effort, Rejected
from tune_model.tune.families.library_halves import FAMILY
from tune_model.tune.relayout import relaid_form, relay

HOPPER = cuda_target()


def geglu(m: int) -> Form:
    """The other gating, the halves the other way round, and a residual."""
    b = FormBuilder("matmul")
    x, w, r = b.input((m, 72), "bfloat16"), b.input((80, 72), "bfloat16", role="weight"), b.input((m, 40), "bfloat16")
    y = b.call("linear.default", x, w)
    up, gate = b.call("slice.Tensor", y, -1, 0, 40), b.call("slice.Tensor", y, -1, 40, 80)
    return b.form(b.call("add.Tensor", r, b.call("mul.Tensor", b.call("gelu.default", gate), up)))


@pytest.mark.parametrize(
    "form", [linear(33, 40, 72, tail="swiglu"), linear(1, 40, 72, "float32", tail="swiglu"), geglu(9)]
)
def test_the_values_are_those_of_the_merged_product(form: Form):
    task = Task(form, NumericRules())
    assert FAMILY.accepts(task, HOPPER) is None
    configs = list(FAMILY.configurations(task, HOPPER, Effort.BALANCED))
    assert {dict(c)["layout"] for c in configs} == {"plain", "transposed"}
    inputs = fill(form)
    (exact,) = run_body(form, [t.double() for t in inputs])
    for config in configs:
        plan = FAMILY.plan(task, config)
        assert not isinstance(plan, Rejected)
        (result,) = interpret(plan, relaid_form(form, plan.layouts), relay(form, tuple(inputs), plan.layouts))
        assert relative_error(result, exact) <= (1e-6 if result.dtype.itemsize == 4 else 2**-7)


def test_another_number_of_rows_is_served_too():
    config = FAMILY.start(Task(geglu(16), NumericRules()), HOPPER)
    plan = FAMILY.plan(Task(geglu(16), NumericRules()), config)
    form = geglu(5)
    inputs = fill(form)
    (result,) = interpret(plan, form, inputs)
    (exact,) = run_body(form, [t.double() for t in inputs])
    assert relative_error(result, exact) <= 2**-7


@pytest.mark.parametrize("tail", ["", "bias", "residual", "gelu"])
def test_a_product_that_is_used_whole_has_no_halves(tail: str):
    refused = FAMILY.accepts(Task(linear(8, 40, 72, tail=tail), NumericRules()), HOPPER)
    assert isinstance(refused, Rejected)
