import math

import pytest
from form_builder import FormBuilder, random_inputs
from interpreted import interpret
from nearness import assert_near
from row_forms import gelu_chain, normal_rope, rms_norm, rope

from tune_model.extract.task import NumericRules, Task
from tune_model.runtime.program import Form
from tune_model.tune.candidate import Rejected
from tune_model.tune.families import triton_pointwise, triton_rows


def check(form: Form, inputs=None, *, configs=None) -> None:
    """Run each configuration and compare with float64 and with ATen."""
    inputs = random_inputs(form) if inputs is None else inputs
    family = triton_rows.FAMILY if configs else triton_pointwise.FAMILY
    for values in configs or [{"block": 64, "num_warps": 1, "pdl": False}]:
        plan = family.plan(Task(form, NumericRules()), tuple(values.items()))
        assert not isinstance(plan, Rejected), plan
        assert_near(form, inputs, interpret(plan, form, inputs))


def tiles(*pairs: tuple[int, int]) -> list[dict[str, int]]:
    fixed = {"num_warps": 1, "stages": 1, "unroll": 1, "pdl": False}
    return [{"rows": rows, "block": block, **fixed} for rows, block in pairs]


ALL = tiles((4, 64), (2, 16))


def test_residual_and_rms_norm_whole_packed_and_looped():
    check(rms_norm(5, 50), configs=tiles((1, 64), (4, 64), (1, 16), (2, 32)))


def test_layer_norm():
    b = FormBuilder("reduction")
    x, w, bias = b.input((2, 3, 48)), b.input((48,)), b.input((48,))
    check(b.form(b.call("layer_norm.default", x, [48], w, bias, 1e-5)), configs=ALL)


def test_softmax_with_a_mask_of_minus_infinities():
    b = FormBuilder("reduction")
    x, m = b.input((6, 40)), b.input((6, 40))
    form = b.form(b.call("softmax.int", b.call("add.Tensor", x, m), -1))
    inputs = random_inputs(form)
    inputs[1][0, :30] = -math.inf
    inputs[1][1, 1:] = -math.inf
    inputs[1][2] = -math.inf
    check(form, inputs, configs=ALL)


@pytest.mark.parametrize("op", ["amax", "amin", "argmax", "argmin", "sum", "prod", "any", "all"])
def test_single_reductions_with_ties_and_nan(op: str):
    b = FormBuilder("reduction")
    x = b.input((6, 45))
    names = {"amax": "amax.default", "amin": "amin.default", "sum": "sum.dim_IntList"}
    name = names.get(op, f"{op}.default" if op.startswith("arg") else f"{op}.dim_int" if op == "prod" else f"{op}.dim")
    dim = [-1] if op in names else -1
    form = b.form(b.call(name, x, dim))
    inputs = random_inputs(form)
    inputs[0] = inputs[0].round()
    if op == "prod":
        inputs[0] = inputs[0] + 0.5
    if op in {"amax", "amin", "argmax", "argmin"}:
        inputs[0][3, 40] = math.nan
        inputs[0][3, 44] = math.nan
        inputs[0][5] = -math.inf
    if op in {"any", "all"}:
        inputs[0][2] = 0
        inputs[0][4] = 1
    check(form, inputs, configs=ALL)


def test_a_reduction_over_leading_rows():
    b = FormBuilder("reduction")
    x = b.input((30, 12))
    check(b.form(b.call("sum.dim_IntList", x, [0])), configs=tiles((8, 32), (16, 8)))


def test_gelu_and_broadcasts():
    b = FormBuilder()
    x, row, column = b.input((7, 33)), b.input((7, 1)), b.input((33,))
    y = b.call("gelu.default", b.call("mul.Tensor", b.call("add.Tensor", x, column), row))
    check(b.form(y))


@pytest.mark.parametrize("columns", [40, 48])
def test_a_flat_kernel_serves_other_numbers_of_rows(columns: int):
    """Of 16 x 40 elements it was promised a count that 5 x 40 does not keep."""
    task, form = Task(gelu_chain(16, columns), NumericRules()), gelu_chain(5, columns)
    plan = triton_pointwise.FAMILY.plan(task, (("block", 64), ("num_warps", 1), ("pdl", False)))
    assert not isinstance(plan, Rejected), plan
    inputs = random_inputs(form)
    assert_near(form, inputs, interpret(plan, form, inputs))


def test_tanh_gelu_in_bfloat16_rounds_where_aten_does():
    b = FormBuilder()
    x = b.input((6, 50), "bfloat16")
    check(b.form(b.call("mul.Tensor", b.call("gelu.default", x, approximate="tanh"), x)))


def test_integers_and_comparisons():
    b = FormBuilder()
    x, y = b.input((5, 40), "int64"), b.input((5, 40), "int64")
    less = b.call("lt.Tensor", x, y)
    quotient = b.call("div.Tensor_mode", x, 3, rounding_mode="floor")
    check(b.form(b.call("where.self", less, b.call("add.Tensor", quotient, y), x), less))


def test_a_permuted_input_and_halves_of_a_row():
    b = FormBuilder()
    x = b.input((4, 6, 10), strides=(6, 1, 24))
    left, right = b.call("slice.Tensor", x, 2, 0, 5), b.call("slice.Tensor", x, 2, 5, 10)
    check(b.form(b.call("mul.Tensor", b.call("silu.default", left), right)))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_halves_of_heads_turned_against_each_other(dtype: str):
    form = rope(5, 3, 32, dtype)
    inputs = random_inputs(form)
    inputs[0][1, 1, 3] = math.nan
    inputs[0][2, 1, 20] = math.inf
    check(form, inputs)
    check(normal_rope(5, 3, 32, dtype), configs=tiles((4, 16), (2, 8), (1, 16)))


def test_rows_gathered_by_an_index():
    b = FormBuilder()
    table = b.input((11, 16))
    from tune_model.runtime.program import ValueRange

    ids = b.input((3, 5), "int64", values=ValueRange(0, 10))
    check(b.form(b.call("mul.Tensor", b.call("embedding.default", table, ids), 2.0)))
