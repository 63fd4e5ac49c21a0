import pytest
import torch
from form_builder import FormBuilder, random_inputs, run_results
from loop_interpreter import interpret

from tune_model.runtime.expression import evaluate
from tune_model.runtime.program import Form
from tune_model.runtime.replay import slot_sizes, unmet
from tune_model.tune.candidate import Rejected
from tune_model.tune.loops.epilogue import Epilogue, lower_epilogue
from tune_model.tune.loops.ir import Access
from tune_model.tune.loops.rounding import elide_rounding


def operand(access: Access, tensor: torch.Tensor, sizes: tuple[int, ...], values: dict[str, int]) -> torch.Tensor:
    strides = tuple(evaluate(s, values) for s in access.strides)
    return tensor.as_strided(sizes, strides, evaluate(access.offset, values))


def run(parts: Epilogue, form: Form, inputs: list[torch.Tensor], *, elide: bool = False) -> list[torch.Tensor]:
    """Multiply in float32 as the parts say and interpret the rest."""
    values = slot_sizes(form)
    by_name = {p.name: t for p, t in zip(form.parameters, inputs, strict=True)}
    batch = (evaluate(parts.batch.extent, values),) if parts.batch else ()
    m = evaluate(parts.m.extent, values)
    a = operand(parts.a, by_name[parts.a.slot], (*batch, m, parts.k), values)
    b = operand(parts.b, by_name[parts.b.slot], (*batch, parts.k, parts.columns), values)
    product = a.float() @ b.float()
    outputs = [torch.zeros(r.type.shape, dtype=getattr(torch, r.type.dtype)) for r in form.results]
    slots = dict(by_name) | {r.name: t for r, t in zip(form.results, outputs, strict=True)}
    for accumulator in parts.accumulators:
        whole = torch.zeros(*batch, m, parts.columns)
        whole[..., : parts.n] = product[..., accumulator.column : accumulator.column + parts.n]
        slots[accumulator.slot] = whole
    interpret(elide_rounding(parts.nest) if elide else parts.nest, slots, values)
    return outputs


def check(form: Form, *, elide: bool = False) -> Epilogue:
    parts = lower_epilogue(form)
    assert isinstance(parts, Epilogue), parts
    inputs = random_inputs(form)
    for got, expected in zip(run(parts, form, inputs, elide=elide), run_results(form, inputs), strict=True):
        tolerance = 3e-2 if expected.dtype == torch.bfloat16 else 2e-5
        torch.testing.assert_close(got, expected, rtol=tolerance, atol=tolerance)
    return parts


def linear(rows: int = 3, dtype: str = "float32", bias: bool = True) -> tuple[FormBuilder, object]:
    b = FormBuilder("matmul")
    x, w = b.input((rows, 24), dtype), b.input((16, 24), dtype, role="weight")
    return b, b.call("linear.default", x, w, b.input((16,), dtype, role="weight") if bias else None)


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_bias_gelu_residual(rows: int, dtype: str) -> None:
    b, t = linear(rows, dtype)
    form = b.form(b.call("add.Tensor", b.call("gelu.default", t), b.input((rows, 16), dtype)))
    parts = check(form)
    assert (parts.k, parts.n, parts.columns, parts.m.size) == (24, 16, 16, rows)
    assert parts.a.strides == (24, 1)
    assert parts.b.strides == (1, 24)
    assert isinstance(parts.m.extent, str)
    check(form, elide=True)


def test_other_row_counts_are_legal() -> None:
    first, second = (b.form(t) for b, t in (linear(2), linear(9)))
    parts = lower_epilogue(first)
    assert all(unmet(r, slot_sizes(second), {}) is None for r in parts.nest.requires)
    inputs = random_inputs(second)
    torch.testing.assert_close(run(parts, second, inputs)[0], run_results(second, inputs)[0], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("how", ["split", "chunk", "slice"])
def test_swiglu_has_two_accumulators(how: str) -> None:
    b, t = linear(5, bias=False)
    match how:
        case "split":
            gate, up = b.call("split_with_sizes.default", t, [8, 8], -1, results=2)
        case "chunk":
            gate, up = b.call("chunk.default", t, 2, -1, results=2)
        case _:
            gate, up = (b.call("slice.Tensor", t, 1, k, k + 8) for k in (0, 8))
    parts = check(b.form(b.call("mul.Tensor", b.call("silu.default", gate), up)))
    assert [(a.slot, a.column) for a in parts.accumulators] == [("acc0", 0), ("acc1", 8)]
    assert (parts.n, parts.columns) == (8, 16)


def test_transposed_and_addmm_and_mm() -> None:
    b = FormBuilder("matmul")
    x, w, c = b.input((5, 24)), b.input((24, 16)), b.input((16,))
    check(b.form(b.call("relu.default", b.call("addmm.default", c, x, w, beta=0.5, alpha=2))))
    b = FormBuilder("matmul")
    x, w = b.input((24, 5)), b.input((16, 24))
    parts = check(b.form(b.call("mm.default", b.call("t.default", x), b.call("t.default", w))))
    assert parts.a.strides == (1, "a0.stride0")


def test_batched() -> None:
    b = FormBuilder("matmul")
    x, y, mask = b.input((6, 5, 8)), b.input((6, 7, 8)), b.input((5, 7))
    scores = b.call("bmm.default", x, b.call("transpose.int", y, 1, 2))
    parts = check(b.form(b.call("add.Tensor", b.call("mul.Tensor", scores, 0.25), mask)))
    assert parts.batch is not None
    assert parts.batch.size == 6


def test_result_seen_as_heads() -> None:
    b, t = linear(6)
    heads = b.call("view.default", t, [6, 4, 4])
    check(b.form(b.call("relu.default", heads)))
    assert isinstance(lower_epilogue(b.form(b.call("transpose.int", heads, 0, 1))), Rejected)


def test_refusals() -> None:
    b, t = linear()
    assert isinstance(lower_epilogue(b.form(b.call("_softmax.default", t, 1, False))), Rejected)
    b, t = linear()
    moved = b.call("cat.default", [b.call("slice.Tensor", t, 1, 8, 16), b.call("slice.Tensor", t, 1, 0, 8)], 1)
    assert isinstance(lower_epilogue(b.form(moved)), Rejected)
    b = FormBuilder("matmul")
    x, w = b.input((3, 24)), b.input((16, 24))
    out = lower_epilogue(b.form(b.call("linear.default", b.call("relu.default", x), w)))
    assert out == Rejected("unsupported", "an operand of the matmul is computed in the form")
