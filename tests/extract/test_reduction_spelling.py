"""Reductions from how models write them to the one spelling that forms use, values included."""

import pytest
import torch
from raw_programs import Function, ops, raw_program, run

from tune_model.extract.regions.group import group
from tune_model.extract.rewrite import rewrite


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
