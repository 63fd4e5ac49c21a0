"""The descriptor kernel in Triton's interpreter, whose descriptors check alignment and mask what lies outside."""

from itertools import islice

import pytest
from devices import cuda_target
from form_runs import fill, relative_error, run_body
from interpreted import interpret
from product_forms import linear, product

from tune_model.extract.task import NumericRules, Task
from tune_model.runtime.program import Form
from tune_model.tune.candidate import Effort, Rejected
from tune_model.tune.families.triton_persistent import FAMILY
from tune_model.tune.relayout import relaid_form, relay

TF32 = NumericRules(allow_tf32=True)


def tile(m: int = 32, n: int = 32, k: int = 32, **changes: object) -> dict[str, object]:
    config = {"block_m": m, "block_n": n, "block_k": k, "group_m": 2, "num_warps": 4, "num_stages": 3, "swap": False}
    mode = {"split_k": 1, "last_adds": False, "programs": 0, "subtiles": 1, "store": False}
    return config | mode | {"layout": "plain", "pdl": False, "prefetch": False} | changes


def check(form: Form, config: dict[str, object], rules: NumericRules = TF32) -> None:
    """The error against float64 is at most twice the sequence's own plus a little."""
    inputs = fill(form)
    exact = run_body(form, [t.double() for t in inputs])
    plan = FAMILY.plan(Task(form, rules), tuple(config.items()))
    assert not isinstance(plan, Rejected), plan
    ours = interpret(plan, relaid_form(form, plan.layouts), relay(form, tuple(inputs), plan.layouts))
    for result, wanted, baseline in zip(ours, exact, run_body(form, inputs), strict=True):
        assert relative_error(result, wanted) <= 2 * relative_error(baseline, wanted) + 2**-8


@pytest.mark.parametrize("tail", ["", "bias", "residual", "gelu", "swiglu"])
@pytest.mark.parametrize("layout", ["plain", "transposed"])
@pytest.mark.parametrize("programs", [0, 3])
def test_ragged_tiles_with_epilogues(tail: str, layout: str, programs: int):
    check(linear(70, 72, 104, tail=tail), tile(layout=layout, programs=programs))


@pytest.mark.parametrize("tail", ["residual", "swiglu"])
@pytest.mark.parametrize("layout", ["plain", "transposed"])
@pytest.mark.parametrize("m", [5, 16, 40])
def test_few_rows_with_swapped_operands(m: int, tail: str, layout: str):
    check(linear(m, 136, 104, tail=tail), tile(16, 64, 32, swap=True, layout=layout))


@pytest.mark.parametrize("tail", ["", "residual", "swiglu"])
@pytest.mark.parametrize(("subtiles", "store"), [(2, False), (1, True), (2, True)])
def test_ways_to_finish_a_tile(tail: str, subtiles: int, store: bool):
    check(linear(45, 136, 72, tail=tail), tile(32, 64, subtiles=subtiles, store=store, programs=2))


@pytest.mark.parametrize("splits", [2, 3])
@pytest.mark.parametrize("tail", ["", "residual", "swiglu"])
@pytest.mark.parametrize("programs", [0, 4])
@pytest.mark.parametrize("last_adds", [False, True])
def test_split_k(splits: int, tail: str, programs: int, last_adds: bool):
    mode = {"split_k": splits, "programs": programs, "last_adds": last_adds}
    check(linear(37, 72, 200, tail=tail), tile(**mode))
    check(linear(9, 72, 200, tail=tail), tile(16, 64, 32, swap=True, **mode))


@pytest.mark.parametrize(
    "mode",
    [
        {},
        {"programs": 3},
        {"subtiles": 2, "store": True, "programs": 2},
        {"split_k": 2},
        {"split_k": 3, "programs": 4, "last_adds": True},
    ],
    ids=str,
)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_two_halves_joined_in_one_tile(mode: dict[str, object], dtype: str):
    check(linear(45, 72, 200, dtype, tail="swiglu"), tile(32, 64, joined=True, **mode))


def test_other_types_and_a_weight_stored_by_columns():
    check(linear(37, 72, 88, "float16", tail="gelu"), tile())
    check(linear(37, 72, 88, "float32", tail="gelu"), tile())
    check(product(37, 72, 88, "float16"), tile())


@pytest.mark.parametrize("layout", ["plain", "transposed"])
def test_what_the_space_offers_computes_the_right_values(layout: str):
    task = Task(linear(100, 144, 520, tail="swiglu"), NumericRules())
    configs = FAMILY.configurations(task, cuda_target(), Effort.THOROUGH)
    some = list(islice((c for c in configs if dict(c)["layout"] == layout and not dict(c)["pdl"]), 0, 60, 12))
    assert len(some) > 2
    for config in some:
        check(task.form, dict(config), task.rules)
