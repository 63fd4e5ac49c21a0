"""Convolutions over patches become linear layers; others stay."""

from collections.abc import Callable

import pytest
import torch
from raw_programs import Example, Function, ops, raw_program, relative_error, run
from torch import Tensor
from torch.nn.functional import conv1d, conv2d, conv3d, layer_norm

from tune_model.extract.plan import lower
from tune_model.extract.rewrite.patches import multiply_patches
from tune_model.extract.rewrite.spelling import spell
from tune_model.extract.tracing.front_end import Trace
from tune_model.runtime.program import Program

PICTURE = (3, 8, 12)


def normal(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(7))


def check(function: Callable[..., Tensor], x: Tensor, *weights: tuple[int, ...]) -> Program:
    """Rewrite, and run the whole lowering as well: values must stay."""
    given: Example = (x, ("batch", *x.shape[1:]))
    module = Function(function, *weights)
    raw = raw_program(module, x=given)
    named = dict(module.named_parameters())
    (expected,) = run(raw, {"x": x}, named)
    rewritten = multiply_patches(spell(raw))
    for program in (rewritten, lower(Trace(raw, {})).trace.program):
        (actual,) = run(program, {"x": x}, named)
        assert actual.stride() == expected.stride()
        assert relative_error(actual, expected) < 1e-6
    return rewritten


@pytest.mark.parametrize("padding", [0, "valid"])
def test_patches_of_a_picture_become_rows_of_a_linear_layer(padding):
    def embedded(x: Tensor, w: Tensor, b: Tensor, scale: Tensor) -> Tensor:
        patches = conv2d(x, w, b, stride=(4, 2), padding=padding)
        return layer_norm(patches.flatten(2).transpose(1, 2), (5,), scale)

    program = check(embedded, normal(3, *PICTURE), (5, 3, 4, 2), (5,), (5,))
    assert [op for op in ops(program) if "conv" in op or op == "linear"] == ["linear"]


def test_without_a_bias_and_read_by_the_caller():
    program = check(lambda x, w: conv2d(x, w, stride=4), normal(2, *PICTURE), (6, 3, 4, 4))
    assert ops(program)[-1] == "clone"


def test_a_reader_that_needs_its_layout_gets_a_copy():
    def twice(x: Tensor, w: Tensor, v: Tensor) -> Tensor:
        return conv2d(conv2d(x, w, stride=2), v, padding=1)

    program = check(twice, normal(2, *PICTURE), (6, 3, 2, 2), (4, 6, 3, 3))
    assert [op for op in ops(program) if op in {"conv2d", "linear", "clone"}] == ["clone", "linear", "clone", "conv2d"]


def test_sound_and_video():
    assert "linear" in ops(check(lambda x, w: conv1d(x, w, stride=5).sin(), normal(2, 3, 20), (4, 3, 5)))
    video = normal(2, 3, 4, 6, 6)
    assert "linear" in ops(check(lambda x, w: conv3d(x, w, stride=(2, 3, 3)).sin(), video, (4, 3, 2, 3, 3)))


@pytest.mark.parametrize(
    "convolve",
    [
        conv2d,  # patches overlap
        lambda x, w: conv2d(x, w, stride=5),  # there are gaps between them, and rows at the end that none covers
        lambda x, w: conv2d(x, w, stride=4, padding=2),
        lambda x, w: conv2d(x, w[:, :, :2, :2], stride=2, dilation=2),
        lambda x, w: conv2d(x, w[:, :1], stride=4, groups=3),
        lambda x, w: conv2d(x, w[..., :1, :1]),  # every pixel by itself: its neighbours want the usual layout
    ],
)
def test_other_convolutions_stay(convolve):
    assert "conv2d" in " ".join(ops(check(convolve, normal(2, *PICTURE), (6, 3, 4, 4))))
