import pytest
import torch

from tune_model.extract.layout import is_row_major, make_type, row_major, strides_of, view, view_strides
from tune_model.runtime.expression import evaluate
from tune_model.runtime.program import Call, Items, Ref, Size, TensorType


@pytest.mark.parametrize(
    ("shape", "strides", "new"),
    [
        ((2, 3, 32), None, (2, 3, 4, 8)),
        ((2, 3, 32), None, (6, 32)),
        ((2, 3, 32), (192, 64, 1), (2, 3, 4, 8)),
        ((2, 3, 32), (192, 64, 1), (6, 32)),
        ((2, 3, 32), (192, 64, 1), (2, 96)),
        ((2, 4, 3, 8), (96, 8, 32, 1), (2, 4, 24)),
        ((2, 1, 32), (64, 64, 1), (2, 1, 1, 32)),
        ((2, 3, 1), (3, 1, 7), (6,)),
        ((4, 6), (6, 1), (2, 12)),
        ((4, 5, 6), (0, 6, 1), (4, 30)),
        ((4, 5, 6), (0, 6, 1), (20, 6)),
    ],
)
def test_reshapes_are_views_exactly_where_torch_says_so(shape, strides, new):
    type_ = TensorType("float32", shape, strides)
    tensor = torch.empty_strided(shape, strides or row_major(shape))
    try:
        expected = tensor.view(new).stride()
    except RuntimeError:
        expected = None
    found = view_strides(type_, new)
    if expected is None:
        assert found is None
    else:
        assert found is not None
        sizes = [n for n in new if n != 1]
        assert [s for s, n in zip(found, new, strict=True) if n != 1] == [
            s for s, n in zip(expected, new, strict=True) if n != 1
        ], sizes


def test_symbolic_reshapes_are_views_for_every_size():
    type_ = TensorType("float32", ("b", "s", 4096), ("s*6144", 6144, 1))
    assert view_strides(type_, ("b", "s", 32, 128)) == ("s*6144", 6144, 128, 1)
    assert view_strides(type_, ("b*s", 4096)) == (6144, 1)
    assert view_strides(type_, ("b*s*4096",)) is None


@pytest.mark.parametrize(
    ("call", "apply"),
    [
        (Call("aten.permute.default", (Ref("x"), Items((2, 0, 1)))), lambda x: x.permute(2, 0, 1)),
        (Call("aten.slice.Tensor", (Ref("x"), 2, 2, 8)), lambda x: x[:, :, 2:8]),
        (Call("aten.slice.Tensor", (Ref("x"), 1, 1, Size("s"), 2)), lambda x: x[:, 1::2]),
        (Call("aten.view.default", (Ref("x"), Items((3, Size("s"), 2, 4)))), lambda x: x.view(3, -1, 2, 4)),
    ],
)
def test_views_have_torchs_layout(call, apply):
    tensor = torch.empty(3, 5, 8)
    expected = apply(tensor)
    found = view(call, TensorType("float32", (3, "s", 8)))
    assert found is not None
    values = {"s": 5}
    assert tuple(evaluate(s, values) for s in found.type.shape) == tuple(expected.shape)
    assert tuple(evaluate(s, values) for s in strides_of(found.type)) == expected.stride()
    assert evaluate(found.offset.dim, values) == expected.storage_offset()


def test_expand_has_stride_0():
    found = view(Call("aten.expand.default", (Ref("x"), Items((Size("b"), 2, 3)))), TensorType("float32", (2, 1)))
    assert found is not None
    assert found.type.strides == (0, 1, 0)


def test_contiguous_types_have_no_strides():
    assert make_type("float32", ("s", 1, 8), (8, 99, 1)) == TensorType("float32", ("s", 1, 8))
    assert is_row_major(TensorType("float32", ("s", 8), (8, 1)))
    assert not is_row_major(TensorType("float32", ("s", 8), (1, "s")))
