"""A kernel that was tuned at one number of rows serves others: its launch facts follow the call."""

import pytest
from form_runs import fill, relative_error, run_body
from interpreted import interpret
from product_forms import linear

from tune_model.extract.task import NumericRules, Task
from tune_model.tune.families import triton_gemv, triton_matmul, triton_persistent, triton_split_k
from tune_model.tune.relayout import relaid_form, relay

TILE = {"block_m": 16, "block_n": 32, "block_k": 32, "group_m": 2, "num_warps": 4, "num_stages": 2, "swap": False}
MODE = {"split_k": 1, "last_adds": False, "programs": 2, "subtiles": 1, "store": False}
COMMON = {"pdl": False, "prefetch": False}
KERNELS = {
    "tiles": (triton_matmul.FAMILY, 16, TILE),
    "split": (triton_split_k.FAMILY, 16, TILE | {"split_k": 3, "last_adds": False}),
    "split, the last adds": (triton_split_k.FAMILY, 16, TILE | {"split_k": 3, "last_adds": True}),
    "described": (triton_persistent.FAMILY, 16, TILE | MODE),
    "described and split": (triton_persistent.FAMILY, 16, TILE | MODE | {"split_k": 2}),
    "described and split, the last adds": (
        triton_persistent.FAMILY,
        16,
        TILE | MODE | {"split_k": 2, "last_adds": True},
    ),
    "gemv": (
        triton_gemv.FAMILY,
        4,
        {"block_n": 16, "block_k": 32, "num_warps": 4, "stages": 2, "unroll": 1},
    ),
}


@pytest.mark.parametrize("rows", [0, 1, 7, 33])
@pytest.mark.parametrize("tail", ["residual", "swiglu"])
@pytest.mark.parametrize("layout", ["plain", "transposed"])
@pytest.mark.parametrize("name", KERNELS)
def test_a_kernel_serves_other_numbers_of_rows_than_its_own(name: str, layout: str, tail: str, rows: int):
    family, own, config = KERNELS[name]
    rows = min(rows, own) if family is triton_gemv.FAMILY else rows
    task = Task(linear(own, 40, 104, tail=tail), NumericRules())
    plan = family.plan(task, tuple((config | COMMON | {"layout": layout}).items()))
    form = linear(rows, 40, 104, tail=tail)
    inputs = fill(form)
    (result,) = interpret(plan, relaid_form(form, plan.layouts), relay(form, tuple(inputs), plan.layouts))
    (exact,) = run_body(form, [t.double() for t in inputs])
    assert result.shape == exact.shape
    assert rows == 0 or relative_error(result, exact) <= 2**-7
