import pytest
import torch
from form_runs import fill, relative_error, run_body
from interpreted import interpret
from product_forms import batched, linear, matrices, product

from tune_model.extract.task import NumericRules, Task
from tune_model.runtime.program import Form
from tune_model.tune.families import triton_gemv, triton_matmul, triton_split_k
from tune_model.tune.relayout import relaid_form, relay


def check(form: Form, family, config) -> None:
    """The error against float64 is at most twice the sequence's own plus one unit in the last place."""
    inputs = fill(form)
    exact = run_body(form, [t.double() for t in inputs])
    plan = family.plan(Task(form, NumericRules()), tuple(config.items()))
    ours = interpret(plan, relaid_form(form, plan.layouts), relay(form, inputs, plan.layouts))
    for result, wanted, baseline in zip(ours, exact, run_body(form, inputs), strict=True):
        unit = torch.finfo(result.dtype).eps
        assert relative_error(result, wanted) <= 2 * relative_error(baseline, wanted) + unit


Values = dict[str, int | bool | str]


def gemv(block_n: int = 2, block_k: int = 64, layout: str = "plain") -> Values:
    values = {"block_n": block_n, "block_k": block_k, "num_warps": 4, "stages": 2, "unroll": 1}
    return values | {"layout": layout, "pdl": False, "prefetch": False}


def tile(
    m: int,
    n: int,
    k: int,
    *,
    swap: bool = False,
    split_k: int | None = None,
    last_adds: bool = False,
    layout: str = "plain",
) -> Values:
    config = {"block_m": m, "block_n": n, "block_k": k, "group_m": 2, "num_warps": 4, "num_stages": 2, "swap": swap}
    config |= {} if split_k is None else {"split_k": split_k, "last_adds": last_adds}
    return config | {"layout": layout, "pdl": False, "prefetch": False}


@pytest.mark.parametrize("m", [1, 3])
@pytest.mark.parametrize("tail", ["", "bias", "residual", "gelu", "swiglu"])
def test_gemv(m: int, tail: str):
    check(linear(m, 6, 96, tail=tail), triton_gemv.FAMILY, gemv())


def test_gemv_with_a_ragged_tail_of_columns_and_of_k():
    check(linear(1, 11, 100, "float32", tail="residual"), triton_gemv.FAMILY, gemv(4, 64))
    check(linear(3, 11, 100, "float16", tail="swiglu"), triton_gemv.FAMILY, gemv(4, 64))


@pytest.mark.parametrize("m", [1, 16, 33, 70])
@pytest.mark.parametrize("swap", [False, True])
def test_tiles_of_few_and_many_rows(m: int, swap: bool):
    check(linear(m, 80, 96, tail="residual"), triton_matmul.FAMILY, tile(16, 32, 32, swap=swap))


@pytest.mark.parametrize("tail", ["", "bias", "gelu", "swiglu"])
@pytest.mark.parametrize("swap", [False, True])
def test_epilogues_over_tiles(tail: str, swap: bool):
    check(linear(19, 40, 72, "float16", tail=tail), triton_matmul.FAMILY, tile(16, 32, 32, swap=swap))


def test_a_matrix_whose_columns_are_contiguous():
    check(product(18, 40, 50), triton_matmul.FAMILY, tile(16, 16, 16))
    check(product(2, 40, 50), triton_gemv.FAMILY, gemv(16, 32))


@pytest.mark.parametrize("splits", [2, 3, 8])
@pytest.mark.parametrize("tail", ["", "residual", "swiglu"])
@pytest.mark.parametrize("last_adds", [False, True])
def test_split_k(splits: int, tail: str, last_adds: bool):
    config = tile(16, 32, 32, split_k=splits, last_adds=last_adds)
    check(linear(5, 40, 200, tail=tail), triton_split_k.FAMILY, config)


@pytest.mark.parametrize("last_adds", [False, True])
def test_split_k_over_many_rows_with_swapped_operands(last_adds: bool):
    config = tile(16, 64, 32, swap=True, split_k=3, last_adds=last_adds)
    check(linear(37, 72, 130, "float32"), triton_split_k.FAMILY, config)


@pytest.mark.parametrize("tail", ["bias", "residual", "swiglu"])
def test_a_weight_stored_as_its_transpose(tail: str):
    check(linear(2, 22, 100, tail=tail), triton_gemv.FAMILY, gemv(16, 32, "transposed"))
    check(linear(1, 22, 100, tail=tail), triton_gemv.FAMILY, gemv(16, 32, "transposed"))
    check(linear(19, 40, 72, tail=tail), triton_matmul.FAMILY, tile(16, 32, 32, layout="transposed"))
    check(linear(19, 72, 72, tail=tail), triton_matmul.FAMILY, tile(16, 64, 32, swap=True, layout="transposed"))
    check(linear(5, 40, 200, tail=tail), triton_split_k.FAMILY, tile(16, 32, 32, split_k=3, layout="transposed"))


@pytest.mark.parametrize("swap", [False, True])
@pytest.mark.parametrize("a", [None, (1, 19)])
@pytest.mark.parametrize("b", [None, (1, 50)])
def test_all_four_orders_of_the_operands(a: tuple[int, int] | None, b: tuple[int, int] | None, swap: bool):
    form = matrices(19, 72, 50, a, b)
    check(form, triton_matmul.FAMILY, tile(16, 64, 16, swap=swap))
    check(form, triton_split_k.FAMILY, tile(16, 64, 16, swap=swap, split_k=2))
    short = matrices(3, 72, 50, None if a is None else (1, 3), b)
    check(short, triton_gemv.FAMILY, gemv(4, 32))


@pytest.mark.parametrize("m", [1, 3, 20])
@pytest.mark.parametrize("tail", ["", "gelu", "residual"])
def test_batches(m: int, tail: str):
    form = batched(3, m, 24, 40, tail=tail)
    check(form, triton_matmul.FAMILY, tile(16, 16, 16))
    if m < 5:
        check(form, triton_gemv.FAMILY, gemv(4, 32))


def test_batches_that_lie_apart_and_crosswise():
    """Rows of one batch between those of another, as heads lie in [tokens, heads, dim]."""
    form = batched(3, 20, 24, 40, a=(40, 120, 1), b=(40 * 24, 1, 40))
    check(form, triton_matmul.FAMILY, tile(16, 16, 16))


@pytest.mark.parametrize("last_adds", [False, True])
@pytest.mark.parametrize("tail", ["", "residual"])
def test_split_k_of_batches(last_adds: bool, tail: str):
    """Parts and counters of one batch beside those of the next."""
    config = tile(16, 32, 32, split_k=3, last_adds=last_adds)
    check(batched(3, 20, 40, 200, tail=tail), triton_split_k.FAMILY, config)
    check(batched(3, 5, 40, 200, "bfloat16", tail=tail), triton_split_k.FAMILY, config)


@pytest.mark.parametrize("last_adds", [False, True])
def test_split_k_of_batches_with_swapped_operands_crosswise(last_adds: bool):
    config = tile(16, 64, 32, swap=True, split_k=2, last_adds=last_adds)
    form = batched(3, 20, 72, 104, a=(104, 312, 1), b=(104 * 72, 1, 104))
    check(form, triton_split_k.FAMILY, config)
