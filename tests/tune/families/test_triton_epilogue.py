"""What follows a library matmul as one kernel: launch facts that hold for other row counts, and the addmm variant."""

import pytest
import torch
from devices import cuda_target
from form_runs import fill, relative_error, run_body
from product_forms import linear

from tune_model.extract.task import NumericRules, Task
from tune_model.runtime.execution.binding import bind_kernel
from tune_model.runtime.kernel import CudaLaunch, Pointer
from tune_model.runtime.program import Call
from tune_model.runtime.replay import slot_sizes, unmet
from tune_model.tune.candidate import Built, Effort, Rejected
from tune_model.tune.families.triton_epilogue import FAMILY

HOPPER = cuda_target(90)


def task(tail: str, m: int = 64) -> Task:
    return Task(linear(m, 256, 128, tail=tail), NumericRules())


def test_nothing_to_do_after_a_bare_product():
    assert isinstance(FAMILY.accepts(task(""), HOPPER), Rejected)


@pytest.mark.parametrize("tail", ["gelu", "swiglu"])
def test_the_product_is_a_library_call_and_the_rest_one_launch(tail: str):
    built = FAMILY.build(task(tail), FAMILY.start(task(tail), HOPPER), HOPPER)
    assert isinstance(built, Built)
    product, launch = built.kernel.steps
    assert isinstance(product, Call)
    assert isinstance(launch, CudaLaunch)
    assert product.op == "aten.linear.default"
    assert Pointer(product.results[0]) in launch.arguments
    other = linear(128, 256, 128, tail=tail)
    assert not [p for r in built.kernel.requires if (p := unmet(r, slot_sizes(other), {}))]


def test_a_residual_goes_into_addmm_with_the_right_values():
    form = linear(33, 256, 128, tail="residual")
    config = (("block", 0), ("num_warps", 0), ("layout", "plain"))
    assert config in list(FAMILY.configurations(Task(form, NumericRules()), HOPPER, Effort.BALANCED))
    built = FAMILY.build(Task(form, NumericRules()), config, HOPPER)
    assert isinstance(built, Built)
    inputs = fill(form)
    exact = run_body(form, [t.double() for t in inputs])
    (result,) = bind_kernel(built.kernel, form, {}, torch.device("cpu"))(inputs)
    assert relative_error(result, exact[0]) < 0.01
