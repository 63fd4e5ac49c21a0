"""Regions that join tensors along the outermost dim."""

import torch
from raw_programs import Function, raw_program, run

from tune_model.extract.plan import lower
from tune_model.extract.tracing.front_end import Trace


def test_pieces_of_one_row_are_joined_in_front():
    """A piece of size 1 along the joined dim lost that dim in the form (BEiT's relative positions are made so)."""

    def stacked(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return torch.stack((x * 2, y.sin())).flatten(1)

    inputs = {"x": (torch.randn(4, 6), ("rows", 6)), "y": (torch.randn(4, 6), ("rows", 6))}
    lowered = lower(Trace(raw_program(Function(stacked), **inputs), {}))
    x, y = inputs["x"][0], inputs["y"][0]
    (seen,) = run(lowered.trace.program, {"x": x, "y": y})
    assert torch.equal(seen, stacked(x, y))
