"""Functions traced, rewritten and grouped into regions, with the values compared."""

import torch
from raw_programs import Example, Function, raw_program, relative_error, run

from tune_model.extract.regions.group import USUAL, Grouping, group
from tune_model.extract.rewrite import rewrite
from tune_model.runtime.program import (
    Apply,
    Form,
    Program,
)

B, T, D = 2, 5, 32
DIMS = ("batch", "sequence", D)


def normal(*shape, dtype=torch.float32, seed=7):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def grouped(module: Function, *, tolerance: float = 1e-5, grouping: Grouping = USUAL, **inputs: Example) -> Program:
    """Rewrite and group a function's program; values must not change."""
    raw = raw_program(module, **inputs)
    program = group(rewrite(raw), grouping).program
    tensors = {name: example for name, (example, _) in inputs.items()}
    weights = dict(module.named_parameters())
    for actual, expected in zip(run(program, tensors, weights), run(raw, tensors, weights), strict=True):
        assert actual.dtype == expected.dtype
        assert actual.shape == expected.shape
        assert relative_error(actual, expected) < tolerance
    return program


def forms(program: Program) -> list[Form]:
    return [program.forms[s.form] for s in program.steps if isinstance(s, Apply)]


def body(form: Form) -> list[str]:
    return [c.op.split(".")[1] for c in form.body]


def only(program: Program) -> Form:
    """The one form of a program that is nothing else."""
    assert [type(s) for s in program.steps] == [Apply]
    return forms(program)[0]
