"""Reductions from how models write them to the one spelling that forms use, values included."""

import pytest
import torch
from raw_programs import Function, ops, raw_program, run

from tune_model.extract.layout import VIEWS
from tune_model.extract.regions.group import group
from tune_model.extract.rewrite import rewrite
from tune_model.runtime.program import Apply, Form, bind_form
from tune_model.tune.loops.ir import LoopNest
from tune_model.tune.loops.lower import lower


def respelled(function, *shape: int):
    """Return the program of a function of one tensor, rewritten, and what it computes for an input of another size."""
    x = torch.randn(*shape)
    dims = ("rows", *shape[1:])
    program = rewrite(raw_program(Function(function), x=(x, dims)))
    again = torch.randn(3, *shape[1:], generator=torch.Generator().manual_seed(1))
    for got, wanted in zip(run(group(program).program, {"x": again}), _tuple(function(again)), strict=True):
        assert got.dtype == wanted.dtype
        torch.testing.assert_close(got, wanted)
    return program


def _tuple(result) -> tuple[torch.Tensor, ...]:
    return result if isinstance(result, tuple) else (result,)


@pytest.mark.parametrize("unbiased", [True, False])
@pytest.mark.parametrize("op", [torch.var, torch.std])
def test_variance_keeps_its_correction(op, unbiased: bool):
    """`var.dim(x, dim, unbiased)` was grouped with `keepdim` in the place of `unbiased`."""
    program = respelled(lambda x: op(x, -1, unbiased=unbiased), 5, 12)
    assert ops(program) == [f"{op.__name__}.correction"]


def one_region(function, *shape: int, weights: tuple[tuple[int, ...], ...] = (), dtype=torch.float32) -> Form:
    """Return the one form that a function of one tensor becomes; it computes the function at another batch size."""
    module = Function(function, *weights, dtype=dtype)
    program = group(rewrite(raw_program(module, x=(torch.randn(*shape).to(dtype), ("rows", *shape[1:]))))).program
    skipped = [step.op for step in program.steps if not isinstance(step, Apply) and step.op not in VIEWS]
    assert not skipped
    again = torch.randn(3, *shape[1:], generator=torch.Generator().manual_seed(1)).to(dtype)
    weight = {f"w{i}": p.detach() for i, p in enumerate(module.parameters())}
    for got, wanted in zip(run(program, {"x": again}, weight), _tuple(module(again)), strict=True):
        assert got.dtype == wanted.dtype
        assert got.shape == wanted.shape
        torch.testing.assert_close(got, wanted)
    (form,) = program.forms.values()
    concrete = bind_form(form, (6,) * len(form.dims))
    nest = lower(concrete)
    assert isinstance(nest, LoopNest), nest
    assert nest.inner
    return concrete


ROWS = (5, 6, 8)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x.prod(-1),
        lambda x: x.prod(1),
        lambda x: (x > 0).any(-1),
        lambda x: (x > 0).all(1, keepdim=True),
        lambda x: (x > 0).any(),
        lambda x: (x > -9).all(),
        lambda x: x.argmin(-1),
        lambda x: x.argmax(0),
        lambda x: x.amax((0, 2)),
        lambda x: x.amin((1, 2), keepdim=True),
        lambda x: x.max(),
        lambda x: x.sum((0, 1)),
        lambda x: x.sum(),
        lambda x: x.mean(),
        lambda x: x.mean((-2, -1), keepdim=True),
        lambda x: x.std(0),
        lambda x: x.var((1, 2), unbiased=False),
        lambda x: x.norm(dim=-1),
        lambda x: torch.linalg.vector_norm(x, 3, dim=(0, 2)),
        lambda x: torch.linalg.vector_norm(x, float("inf"), dim=1),
        torch.linalg.vector_norm,
        lambda x: x.logsumexp((0, 1)),
        lambda x: x.logsumexp(-1, keepdim=True),
        lambda x: x.max(1),
        lambda x: x.min(2, keepdim=True),
        lambda x: (x.amax(-1), x.argmin(-1), x.sum(-1), x.mean(-1)),
        lambda x: x / x.norm(dim=-1, keepdim=True).clamp_min(1e-12),
        lambda x: (x - x.mean((1, 2), keepdim=True)) * torch.rsqrt(x.var((1, 2), keepdim=True) + 1e-5),
        lambda x: torch.softmax(x, 1),
        lambda x: (x * 0.5).sum(0) + 1,
    ],
    ids=range(30),
)
def test_reductions_are_one_region(function):
    one_region(function, *ROWS)


def test_what_lies_together_is_one_loop():
    """Two reduced dims back to back in memory are one, and so a form is the same for both ways to ask."""
    assert one_region(lambda x: x.sum((1, 2)), *ROWS) == one_region(lambda x: x.flatten(1).sum(1), *ROWS)
    assert len(one_region(lambda x: x.sum((0, 2)), *ROWS).parameters[0].type.shape) == 3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_norms_over_groups_of_dims_keep_them(dtype):
    def group_norm(x, w, b):
        return torch.nn.functional.silu(torch.nn.functional.group_norm(x, 3, w, b))

    form = one_region(group_norm, 2, 6, 4, 5, weights=((6,), (6,)), dtype=dtype)
    assert [call.op for call in form.body] == ["aten.group_norm.default", "aten.silu.default"]
    form = one_region(
        lambda x, w, b: torch.nn.functional.layer_norm(x + 1, (4, 5), w, b),
        3,
        4,
        5,
        weights=((4, 5), (4, 5)),
        dtype=dtype,
    )
    assert [call.op for call in form.body] == ["aten.add.Scalar", "aten.layer_norm.default"]


def test_a_position_in_the_flattened_tensor_stays_a_call():
    program = raw_program(Function(lambda x: x.argmax()), x=(torch.randn(4, 6), (4, 6)))
    (skipped,) = group(rewrite(program)).skipped
    assert skipped.op == "aten.argmax.default"
    assert skipped.reason == "a position among all elements"
