"""Long dot products that cancel: the kernels' order of summation is no worse than the library's."""

import pytest
import torch
from cancelling import cancelling
from form_runs import relative_error, run_body
from interpreted import interpret
from product_forms import linear

from tune_model.extract.task import NumericRules, Task
from tune_model.tune.families import triton_gemv, triton_matmul, triton_persistent, triton_split_k
from tune_model.tune.relayout import relaid_form, relay

GEMV = {"block_n": 8, "block_k": 2048, "num_warps": 4, "stages": 2, "unroll": 1}
TILE = {"block_m": 16, "block_n": 32, "block_k": 256, "group_m": 8, "num_warps": 4, "num_stages": 3, "swap": False}
MODE = {"split_k": 1, "last_adds": False, "programs": 0, "subtiles": 1, "store": False}
COMMON = {"layout": "plain", "pdl": False, "prefetch": False}
KERNELS = {
    "gemv": (triton_gemv.FAMILY, GEMV),
    "tiles": (triton_matmul.FAMILY, TILE),
    "swapped": (triton_matmul.FAMILY, TILE | {"block_n": 64, "swap": True}),
    "split": (triton_split_k.FAMILY, TILE | {"split_k": 4, "last_adds": False}),
    "split, the last adds": (triton_split_k.FAMILY, TILE | {"split_k": 4, "last_adds": True}),
    "described": (triton_persistent.FAMILY, TILE | MODE),
    "described and split": (triton_persistent.FAMILY, TILE | MODE | {"split_k": 4}),
}


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("k", [1024, 65536])
@pytest.mark.parametrize("name", KERNELS)
def test_the_error_is_at_most_twice_the_librarys(name: str, k: int, dtype: str):
    family, config = KERNELS[name]
    if family is triton_persistent.FAMILY and dtype == "float32":
        pytest.skip("float32 without tf32 is not for tensor cores")
    form = linear(2 if name == "gemv" else 8, 64, k, dtype)
    inputs = cancelling(form)
    (exact,) = run_body(form, [t.double() for t in inputs])
    # The terms are a hundred times and more the size of what is left of them.
    terms = inputs[0].double().abs() @ inputs[1].double().abs().T
    assert (terms.mean() / exact.abs().mean()) > 100
    plan = family.plan(Task(form, NumericRules()), tuple((config | COMMON).items()))
    (ours,) = interpret(plan, relaid_form(form, plan.layouts), relay(form, tuple(inputs), plan.layouts))
    (library,) = run_body(form, inputs)
    allowed = 2 * relative_error(library, exact) + torch.finfo(ours.dtype).eps
    assert relative_error(ours, exact) <= allowed
