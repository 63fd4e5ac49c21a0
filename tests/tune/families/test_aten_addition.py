"""A product and what is added to it as one call of the library's, with the factors that both had."""

import pytest
import torch
from devices import cuda_target
from family_runs import built, refusals
from form_builder import FormBuilder
from form_runs import fill, relative_error, run_body
from product_forms import linear

from tune_model.extract.task import NumericRules, Task
from tune_model.runtime.execution.binding import bind_kernel
from tune_model.runtime.program import Call, Form
from tune_model.tune.candidate import Effort, Rejected
from tune_model.tune.families.aten_addition import FAMILY
from tune_model.tune.machine.cpu import probe_cpu

HOPPER, CPU = cuda_target(), probe_cpu()


def summed(
    op: str, *, m: int = 6, dtype: str = "float32", scale: float = 1.0, factor: float = 1.0, first: bool = True
) -> Form:
    """`c + factor * (scale * a @ b)`, or with the product first `scale * a @ b + factor * c`."""
    b = FormBuilder("matmul")
    batch = (3,) if op == "bmm" else ()
    x = b.input((*batch, m, 40), dtype)
    w = b.input((24, 40), dtype, role="weight") if op == "linear" else b.input((*batch, 40, 24), dtype)
    c = b.input((*batch, m, 24) if op != "bmm" else (3, 1, 24), dtype)
    y = b.call(f"{op}.default", x, w)
    if scale != 1.0:
        y = b.call("mul.Scalar", y, scale)
    given = {} if factor == 1.0 else {"alpha": factor}
    return b.form(b.call("add.Tensor", *((c, y) if first else (y, c)), **given))


@pytest.mark.parametrize("op", ["linear", "mm", "bmm"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("scale", "factor"), [(1.0, 1.0), (0.125, 1.0), (1.0, -0.5), (0.3, 2.5)])
@pytest.mark.parametrize("first", [True, False])
def test_the_values_are_those_of_the_sum(op: str, dtype: str, scale: float, factor: float, first: bool):
    def make(m: int) -> Form:
        return summed(op, m=m, dtype=dtype, scale=scale, factor=factor, first=first)

    ((config, made),) = built(FAMILY, make(6), CPU, Effort.QUICK)
    assert config == ()
    call = made.kernel.steps[-1]
    assert isinstance(call, Call)
    assert call.op == ("aten.baddbmm.default" if op == "bmm" else "aten.addmm.default")
    for m in (6, 1):
        form = make(m)
        assert not refusals(made, form)
        inputs = fill(form)
        (exact,) = run_body(form, [t.double() for t in inputs])
        (own,) = run_body(form, inputs)
        (result,) = bind_kernel(made.kernel, form, {}, torch.device("cpu"))(inputs)
        limit = 2 * relative_error(own, exact) + torch.finfo(result.dtype).eps
        assert relative_error(result, exact) <= limit


def twice() -> Form:
    b = FormBuilder("matmul")
    y = b.call("bmm.default", b.input((2, 4, 8)), b.input((2, 8, 8)))
    return b.form(b.call("add.Tensor", y, y))


def widened() -> Form:
    b = FormBuilder("matmul")
    y = b.call("mm.default", b.input((4, 8), "bfloat16"), b.input((8, 8), "bfloat16"))
    return b.form(b.call("add.Tensor", y, b.input((4, 8), "float32")))


@pytest.mark.parametrize(
    ("form", "why"),
    [
        (linear(4, 32, 16), "after the product"),
        (linear(4, 32, 16, tail="bias"), "product of two matrices"),
        (linear(4, 32, 16, tail="swiglu"), "after the product"),
        (linear(4, 32, 16, tail="gelu"), "after the product"),
        (twice(), "not a sum of the product"),
        (widened(), "several types"),
    ],
)
def test_other_work_after_a_product_is_refused(form: Form, why: str):
    refused = FAMILY.accepts(Task(form, NumericRules()), CPU)
    assert isinstance(refused, Rejected)
    assert why in refused.detail


def test_a_residual_on_a_gpu_is_another_familys():
    task = Task(summed("linear"), NumericRules())
    assert isinstance(FAMILY.accepts(task, HOPPER), Rejected)
    assert FAMILY.accepts(task, CPU) is None
    assert FAMILY.accepts(Task(summed("linear", scale=0.5), NumericRules()), HOPPER) is None
