import math

import pytest
import torch
from form_builder import FormBuilder, random_inputs, run_results
from loop_catalogue import UNARY, special_values
from loop_interpreter import run_nest as run

from tune_model.runtime.program import Form, Parameter, TensorType, ValueRange
from tune_model.runtime.replay import slot_sizes, unmet
from tune_model.tune.candidate import Rejected
from tune_model.tune.loops.ir import LoopNest
from tune_model.tune.loops.lower import lower


def check(form: Form, *, seed: int = 0, inputs: list[torch.Tensor] | None = None) -> LoopNest:
    nest = lower(form)
    assert isinstance(nest, LoopNest), nest
    inputs = random_inputs(form, seed=seed) if inputs is None else inputs
    for r in nest.requires:
        assert unmet(r, slot_sizes(form), {}) is None
    outputs = run(nest, form, inputs)
    for got, expected in zip(outputs, run_results(form, inputs), strict=True):
        tolerance = {torch.bfloat16: 1.6e-2, torch.float16: 2e-3}.get(expected.dtype, 2e-6)
        torch.testing.assert_close(got, expected, rtol=tolerance, atol=tolerance, equal_nan=True)
    return nest


def layer(dtype: str = "float32", rows: int = 6, columns: int = 33) -> Form:
    b = FormBuilder("reduction")
    x, y = b.input((rows, columns), dtype), b.input((rows, columns), dtype)
    w, c = b.input((columns,), dtype, role="weight"), b.input((columns,), dtype, role="weight")
    s = b.call("add.Tensor", x, y)
    return b.form(s, b.call("layer_norm.default", s, [columns], w, c, 1e-5))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_residual_and_its_norm(dtype: str) -> None:
    nest = check(layer(dtype))
    assert [a.size for a in nest.axes] == [6, 33]
    assert nest.axes[0].extent == "t0.size0" or nest.axes[0].extent == "a0.size0"
    assert nest.axes[1].extent == 33
    assert len(nest.stores) == 2


def test_the_same_nest_serves_other_row_counts() -> None:
    nest = lower(layer(rows=6))
    other = layer(rows=11)
    assert all(unmet(r, slot_sizes(other), {}) is None for r in nest.requires)
    inputs = random_inputs(other)
    for got, expected in zip(run(nest, other, inputs), run_results(other, inputs), strict=True):
        torch.testing.assert_close(got, expected)
    assert any(unmet(r, slot_sizes(layer(columns=34)), {}) for r in nest.requires)


def rope(shape: tuple[int, ...] = (2, 5, 4, 8)) -> Form:
    batch, length, heads, width = shape
    b = FormBuilder()
    x = b.input((batch, length, heads * width))
    cos, sin = b.input((batch, length, width)), b.input((batch, length, width))
    q = b.call("transpose.int", b.call("view.default", x, [batch, length, heads, width]), 1, 2)
    cos, sin = b.call("unsqueeze.default", cos, 1), b.call("unsqueeze.default", sin, 1)
    first = b.call("slice.Tensor", q, 3, 0, width // 2)
    second = b.call("slice.Tensor", q, 3, width // 2, 2**63 - 1)
    turned = b.call("cat.default", [b.call("neg.default", second), first], -1)
    out = b.call("add.Tensor", b.call("mul.Tensor", q, cos), b.call("mul.Tensor", turned, sin))
    return b.form(out)


def test_rope_is_one_nest_and_serves_other_batches_and_lengths() -> None:
    nest = check(rope())
    other = rope((3, 7, 4, 8))
    assert all(unmet(r, slot_sizes(other), {}) is None for r in nest.requires), nest.requires
    inputs = random_inputs(other)
    torch.testing.assert_close(run(nest, other, inputs)[0], run_results(other, inputs)[0])


def test_contiguous_pointwise_is_one_axis() -> None:
    b = FormBuilder()
    x, y = b.input((3, 4, 5)), b.input((3, 4, 5))
    nest = check(b.form(b.call("gelu.default", b.call("add.Tensor", x, y))))
    assert [a.size for a in nest.axes] == [60]


@pytest.mark.parametrize("op", [*UNARY, "gelu"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_unary(op: str, dtype: str) -> None:
    b = FormBuilder()
    x = b.input((4, 16), dtype)
    form = b.form(b.call(f"{op}.default", x))
    inputs = random_inputs(form)
    inputs[0].view(-1)[:6] = special_values([op])[:6]
    check(form, inputs=inputs)


BINARY = ["add.Tensor", "sub.Tensor", "mul.Tensor", "div.Tensor", "maximum.default", "minimum.default", "fmod.Tensor"]
BINARY += ["remainder.Tensor", "floor_divide.default", "eq.Tensor", "ne.Tensor", "lt.Tensor", "le.Tensor", "gt.Tensor"]
BINARY += ["ge.Tensor", "logical_and.default", "logical_or.default", "logical_xor.default", "atan2.default"]


@pytest.mark.parametrize("op", BINARY)
@pytest.mark.parametrize(
    "dtypes", [("float32", "float32"), ("bfloat16", "float32"), ("int64", "float32"), ("bool", "int32")]
)
def test_binary_promotes_as_torch(op: str, dtypes: tuple[str, str]) -> None:
    if "bool" in dtypes and op.startswith(("sub", "fmod", "remainder", "floor_divide")):
        dtypes = ("int32", "int64")
    b = FormBuilder()
    x, y = b.input((4, 1, 6), dtypes[0]), b.input((5, 6), dtypes[1])
    form = b.form(b.call(op, x, y))
    inputs = random_inputs(form)
    if "div" in op or "mod" in op or "remainder" in op:
        inputs[1][inputs[1] == 0] = 1
    check(form, inputs=inputs)


def test_integer_division_and_bits() -> None:
    b = FormBuilder()
    x, y = b.input((40,), "int64", values=ValueRange(-20, 20)), b.input((40,), "int64", values=ValueRange(1, 7))
    outs = [b.call("div.Tensor_mode", x, y, rounding_mode=m) for m in ("floor", "trunc")]
    outs += [b.call(f"bitwise_{n}.Tensor", x, y) for n in ("and", "or", "xor")]
    outs += [b.call("remainder.Scalar", x, -3), b.call("bitwise_not.default", x), b.call("pow.Tensor_Scalar", x, 3)]
    check(b.form(*outs))


@pytest.mark.parametrize("exponent", [0, 1, 2, 3, -1, -2, 0.5, -0.5, 2.5])
def test_power(exponent: float) -> None:
    b = FormBuilder()
    x = b.call("abs.default", b.input((7, 3)))
    check(b.form(b.call("pow.Tensor_Scalar", x, exponent)))


def test_ternary_and_masks() -> None:
    b = FormBuilder()
    x, y, m = b.input((4, 6, 6)), b.input((6,)), b.input((4, 1, 6), "bool")
    lower_triangle = b.call("tril.default", x)
    masked = b.call("masked_fill.Scalar", lower_triangle, m, -math.inf)
    clamped = b.call("clamp.default", masked, -1.0, 0.5)
    out = b.call("where.self", m, clamped, b.call("addcmul.default", x, y, x, value=0.5))
    column = b.call("arange.start", 2, 8)
    check(b.form(b.call("add.Tensor", out, column)))


def test_full_and_casts() -> None:
    b = FormBuilder()
    x = b.input((4, 6), "bfloat16")
    wide = b.call("_to_copy.default", x, dtype=torch.float32)
    ones = b.call("full.default", [4, 6], 2.5, dtype=torch.float32)
    out = b.call("mul.Tensor", wide, ones)
    check(
        b.form(
            out, b.call("_to_copy.default", out, dtype=torch.int32), b.call("_to_copy.default", out, dtype=torch.bool)
        )
    )


REDUCE = [
    "sum.dim_IntList",
    "mean.dim",
    "amax.default",
    "amin.default",
    "logsumexp.default",
    "linalg_vector_norm.default",
]
REDUCE += ["any.dims", "all.dims", "var.correction", "std.correction"]


@pytest.mark.parametrize("op", REDUCE)
@pytest.mark.parametrize("dims", [[-1], [0], [1, 2], [0, 2], [0, 1, 2]])
@pytest.mark.parametrize("keep", [True, False])
def test_reductions(op: str, dims: list[int], keep: bool) -> None:
    b = FormBuilder("reduction")
    x = b.input((4, 5, 6))
    args = (2, dims) if op.startswith("linalg") else (dims,)
    spread = op[:3] in {"var", "std"}
    out = b.call(op, x, dims, correction=1, keepdim=keep) if spread else b.call(op, x, *args, keep)
    check(b.form(out))


@pytest.mark.parametrize("op", ["argmax", "argmin"])
@pytest.mark.parametrize("dim", [None, 0, -1])
def test_arg_reductions(op: str, dim: int | None) -> None:
    b = FormBuilder("reduction")
    x = b.input((5, 7))
    form = b.form(b.call(f"{op}.default", x, dim))
    inputs = random_inputs(form)
    inputs[0][2, 4] = math.nan
    check(form, inputs=inputs)


def test_max_with_indices_and_norm_orders() -> None:
    b = FormBuilder("reduction")
    x = b.input((5, 7), "bfloat16")
    values, indices = b.call("max.dim", x, 1, results=2)
    orders = [b.call("linalg_vector_norm.default", x, p, [1]) for p in (0, 1, 2, 3.0, math.inf, -math.inf)]
    check(b.form(values, indices, *orders))


@pytest.mark.parametrize("op", ["_softmax.default", "_log_softmax.default"])
@pytest.mark.parametrize("dim", [0, 1, -1])
def test_softmax(op: str, dim: int) -> None:
    b = FormBuilder("reduction")
    x = b.input((4, 5, 6))
    form = b.form(b.call(op, b.call("mul.Tensor", x, 0.125), dim, False))
    inputs = random_inputs(form)
    inputs[0][1, 2] = -math.inf
    inputs[0][0, 0, 0] = -math.inf
    check(form, inputs=inputs)


def test_softmax_with_mask_and_dtype() -> None:
    b = FormBuilder("reduction")
    scores, mask = b.input((2, 3, 5, 5), "bfloat16"), b.input((2, 1, 5, 5), "bfloat16")
    s = b.call("add.Tensor", b.call("mul.Tensor", scores, 0.125), mask)
    out = b.call("softmax.int", s, -1, torch.float32)
    check(b.form(b.call("_to_copy.default", out, dtype=torch.bfloat16)))


def hf_rms_norm(dtype: str = "bfloat16") -> Form:
    b = FormBuilder("reduction")
    x, w = b.input((4, 16), dtype), b.input((16,), dtype, role="weight")
    wide = b.call("_to_copy.default", x, dtype=torch.float32)
    mean = b.call("mean.dim", b.call("pow.Tensor_Scalar", wide, 2), [-1], True)
    scale = b.call("rsqrt.default", b.call("add.Tensor", mean, 1e-6))
    normed = b.call("_to_copy.default", b.call("mul.Tensor", wide, scale), dtype=getattr(torch, dtype))
    return b.form(b.call("mul.Tensor", w, normed))


def test_rms_norm_spelled_out_equals_bitwise_rounding() -> None:
    form = hf_rms_norm()
    nest = lower(form)
    inputs = random_inputs(form)
    assert torch.equal(run(nest, form, inputs)[0], run_results(form, inputs)[0])


@pytest.mark.parametrize("eps", [None, 1e-5])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_rms_norm(dtype: str, eps: float | None) -> None:
    b = FormBuilder("reduction")
    x, w = b.input((4, 16), dtype), b.input((16,), dtype)
    check(b.form(b.call("rms_norm.default", x, [16], w, eps)))


def test_norms_with_statistics() -> None:
    b = FormBuilder("reduction")
    x, w, c = b.input((4, 3, 16)), b.input((3, 16)), b.input((3, 16))
    check(b.form(*b.call("native_layer_norm.default", x, [3, 16], w, c, 1e-5, results=3)))


def test_group_norm_splits_the_channels() -> None:
    b = FormBuilder("reduction")
    x, w, c = b.input((2, 6, 5)), b.input((6,)), b.input((6,))
    check(b.form(b.call("silu.default", b.call("group_norm.default", x, 3, w, c))))


def test_norm_of_each_head_then_rope() -> None:
    """The query norm of Qwen3: columns of the norm are the last part of the result's columns."""
    b = FormBuilder("reduction")
    x, w = b.input((5, 24)), b.input((8,))
    cos = b.input((5, 1, 8))
    q = b.call("view.default", x, [5, 3, 8])
    normed = b.call("rms_norm.default", q, [8], w, 1e-6)
    turned = b.call(
        "cat.default",
        [b.call("neg.default", b.call("slice.Tensor", normed, 2, 4, 8)), b.call("slice.Tensor", normed, 2, 0, 4)],
        2,
    )
    out = b.call("add.Tensor", b.call("mul.Tensor", normed, cos), turned)
    check(b.form(b.call("view.default", out, [5, 24])))


def test_embedding_and_its_norm() -> None:
    b = FormBuilder("reduction")
    ids = b.input((4, 3), "int64", values=ValueRange(0, 9))
    table, position, w, c = b.input((10, 8)), b.input((3, 8)), b.input((8,)), b.input((8,))
    s = b.call("add.Tensor", b.call("embedding.default", table, ids), position)
    check(b.form(b.call("layer_norm.default", s, [8], w, c, 1e-12)))


def test_views() -> None:
    b = FormBuilder()
    x = b.input((4, 6, 10))
    parts = b.call("split_with_sizes.default", x, [2, 5, 3], 2, results=3)
    stacked = b.call("stack.default", [b.call("select.int", x, 1, k) for k in (0, 3)], 1)
    padded = b.call("constant_pad_nd.default", parts[1], [1, 2, -1, 0], 0.5)
    flipped = b.call("flip.default", padded, [2])
    back = b.call("permute.default", flipped, [2, 0, 1])
    form = b.form(back)
    check(form)
    b2 = FormBuilder()
    y = b2.input((4, 6, 10))
    pieces = [b2.call("select.int", y, 1, k) for k in (0, -1)]
    both = b2.call("reshape.default", b2.call("stack.default", pieces, 1), [8, 10])
    check(b2.form(b2.call("repeat_interleave.self_int", b2.call("repeat.default", both, [1, 2]), 3, 0)))
    assert stacked is not None


def test_strided_inputs_and_outputs() -> None:
    b = FormBuilder()
    x, y = b.input((4, 6, 10), strides=(1, 4, 24)), b.input((6, 10), strides=(1, 6))
    draft = b.form(b.call("add.Tensor", x, y))
    result = Parameter(draft.results[0].name, TensorType("float32", (4, 6, 10), (10, 40, 1)))
    form = Form("pointwise", (), draft.parameters, draft.body, (result,))
    nest = check(form)
    assert [a.size for a in nest.axes] == [6, 4, 10]


def test_several_reductions_and_a_row_result() -> None:
    b = FormBuilder("reduction")
    x = b.input((6, 50))
    top = b.call("amax.default", x, [1], True)
    centered = b.call("sub.Tensor", x, top)
    check(
        b.form(
            centered, b.call("argmax.default", x, 1), b.call("sum.dim_IntList", b.call("exp.default", centered), [1])
        )
    )


@pytest.mark.parametrize("shape", [(0, 5), (1, 1), (1, 5), (5, 1)])
def test_small_and_empty(shape: tuple[int, int]) -> None:
    b = FormBuilder("reduction")
    x = b.input(shape)
    check(b.form(b.call("_softmax.default", x, 1, False)))


def test_reduction_over_nothing() -> None:
    b = FormBuilder("reduction")
    x = b.input((3, 0))
    check(b.form(b.call("sum.dim_IntList", x, [1]), b.call("mean.dim", x, [1])))


def test_refusals_name_the_reason() -> None:
    b = FormBuilder()
    form = b.form(b.call("cumsum.default", b.input((4, 5)), 1))
    assert lower(form) == Rejected("unsupported", "operator aten.cumsum.default")
    b = FormBuilder("reduction")
    x = b.input((4, 6))
    total = b.call("sum.dim_IntList", x, [1], True)
    out = lower(b.form(b.call("add.Tensor", total, b.input((4, 5)))))
    assert isinstance(out, Rejected)
    assert "6 columns" in out.detail
