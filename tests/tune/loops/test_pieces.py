import math

import pytest
import torch
from form_builder import FormBuilder, random_inputs, run_results
from loop_interpreter import run_nest
from row_forms import normal_rope, rope

from tune_model.runtime.program import Form, Ref
from tune_model.tune.loops.ir import Inside, Load, LoopNest
from tune_model.tune.loops.lower import lower
from tune_model.tune.loops.pieces import in_pieces


def cut(form: Form, inputs: list[torch.Tensor] | None = None) -> LoopNest:
    """Cut a form's nest and compare what it computes with ATen."""
    nest = lower(form)
    assert isinstance(nest, LoopNest), nest
    inputs = random_inputs(form) if inputs is None else inputs
    made = in_pieces(nest)
    for got, expected in zip(run_nest(made, form, inputs), run_results(form, inputs), strict=True):
        tolerance = {torch.bfloat16: 1.6e-2}.get(expected.dtype, 1e-5)
        torch.testing.assert_close(got, expected, rtol=tolerance, atol=tolerance, equal_nan=True)
    return made


def asks(nest: LoopNest) -> bool:
    """Whether any element still asks which piece it lies in."""
    return any(isinstance(n, Inside) or (isinstance(n, Load) and n.where) for n in nest.nodes)


def loads(nest: LoopNest) -> int:
    return sum(isinstance(n, Load) for n in nest.nodes)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("tokens", [0, 1, 7])
def test_a_rotary_embedding_reads_each_half_once(dtype: str, tokens: int) -> None:
    nest = cut(rope(tokens, 5, 32, dtype))
    assert [a.size for a in nest.axes][-1] == 16
    assert not asks(nest)
    assert loads(nest) == 6  # both halves of the heads, of the cosines and of the sines
    assert len(nest.stores) == 2


def test_a_norm_before_a_rotary_embedding_is_joined_from_both_halves() -> None:
    nest = cut(normal_rope(6, 4, 32, "float32"))
    assert nest.inner == 1
    assert nest.axes[-1].size == 16
    assert not asks(nest)
    assert loads(nest) == 8


def joined(widths: tuple[int, ...], *, rows: int = 3) -> Form:
    b = FormBuilder()
    parts = [b.call("neg.default", b.input((rows, w))) for w in widths]
    return b.form(b.call("mul.Tensor", b.call("cat.default", parts, -1), 2.0))


@pytest.mark.parametrize(("widths", "width"), [((8, 24), 8), ((16, 16, 16), 16), ((24, 8), 8)])
def test_unequal_pieces_are_cut_into_equal_ones(widths: tuple[int, ...], width: int) -> None:
    nest = cut(joined(widths))
    assert nest.axes[-1].size == width
    assert not asks(nest)


@pytest.mark.parametrize("widths", [(8, 72), (3, 5), (4, 4), (7, 25)])
def test_many_or_narrow_pieces_stay_tests(widths: tuple[int, ...]) -> None:
    form = joined(widths)
    nest = lower(form)
    assert isinstance(nest, LoopNest)
    assert in_pieces(nest) is nest
    assert asks(nest)


def test_what_nobody_reads_outside_a_piece_does_not_reach_the_result() -> None:
    """NaN and infinity in one half's other factor must not come through a chosen half."""
    form = rope(2, 3, 32, "float32")
    inputs = random_inputs(form)
    inputs[0][0, 0, 3] = math.nan
    inputs[0][1, 1, 20] = math.inf
    inputs[0][1, 2, 5] = -math.inf
    cut(form, inputs)


def test_rows_of_a_concatenation_are_cut_too() -> None:
    b = FormBuilder()
    x, y, scale = b.input((16, 24)), b.input((16, 24)), b.input((24,))
    whole = b.call("cat.default", [x, b.call("neg.default", y)], 0)
    nest = cut(b.form(b.call("mul.Tensor", whole, scale)))
    assert not asks(nest)


def padded(b: FormBuilder, x: Ref) -> Ref:
    return b.call("constant_pad_nd.default", x, [16, 16], 0.5)


def test_a_border_is_a_piece_of_its_own() -> None:
    b = FormBuilder()
    nest = cut(b.form(b.call("mul.Tensor", padded(b, b.input((5, 16))), 3.0)))
    assert not asks(nest)
    assert loads(nest) == 1


@pytest.mark.parametrize("op", ["sum.dim_IntList", "amax.default", "amin.default", "prod.dim_int"])
def test_reductions_over_a_concatenated_row(op: str) -> None:
    b = FormBuilder("reduction")
    whole = b.call("cat.default", [b.input((4, 16)), b.call("abs.default", b.input((4, 16)))], -1)
    dim: object = -1 if "int" in op and "Int" not in op else [-1]
    form = b.form(b.call(op, whole, dim))
    inputs = random_inputs(form)
    inputs[0][1, 3] = math.nan
    inputs[1][2, 3] = math.inf
    assert not asks(cut(form, inputs))


@pytest.mark.parametrize("op", ["any.dim", "all.dim"])
def test_truth_of_a_concatenated_row(op: str) -> None:
    b = FormBuilder("reduction")
    x, y = b.input((4, 16)), b.input((4, 16))
    whole = b.call("cat.default", [b.call("gt.Scalar", x, 1.0), b.call("lt.Scalar", y, 9.0)], -1)
    assert not asks(cut(b.form(b.call(op, whole, -1))))


def test_a_position_among_pieces_is_left_as_it_is() -> None:
    b = FormBuilder("reduction")
    whole = b.call("cat.default", [b.input((4, 16)), b.input((4, 16))], -1)
    nest = cut(b.form(b.call("argmax.default", whole, -1)))
    assert asks(nest)
