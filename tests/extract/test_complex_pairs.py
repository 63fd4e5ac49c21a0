"""Complex arithmetic becomes real arithmetic, or stays where it cannot all become so."""

import torch
from raw_programs import Example, Function, ops, raw_program, relative_error, run

from tune_model.extract.plan import lower
from tune_model.extract.rewrite.complex_pairs import take_complex_numbers_apart
from tune_model.extract.rewrite.spelling import spell
from tune_model.extract.tracing.front_end import Trace
from tune_model.runtime.program import Program

HEADS, DEPTH = 3, 8


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(7))


X: Example = (normal(2, 5, HEADS * DEPTH), ("batch", "length", HEADS * DEPTH))
ANGLES: Example = (normal(5, DEPTH // 2), ("length", DEPTH // 2))


def rotated(x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
    """As DeepSeek-V2 and the first Llama write it."""
    turns = torch.polar(torch.ones_like(angles), angles) * 1.5
    pairs = torch.view_as_complex(x.unflatten(-1, (HEADS, DEPTH // 2, 2)).transpose(1, 2))
    return torch.view_as_real(pairs * turns[None, None]).flatten(3)


def check(function, passes=(spell, take_complex_numbers_apart)) -> Program:
    raw = raw_program(Function(function), x=X, angles=ANGLES)
    program = raw
    for one in passes:
        program = one(program)
    tensors = {"x": X[0], "angles": ANGLES[0]}
    for actual, expected in zip(run(program, tensors), run(raw, tensors), strict=True):
        assert relative_error(actual, expected) < 1e-6
    return program


def test_a_rotary_embedding_of_complex_numbers_becomes_real():
    program = check(rotated)
    assert not any(type_.dtype.startswith("complex") for type_ in program.values.values())
    assert "ones_like" not in ops(program)


def test_it_is_pointwise_work_then():
    raw = raw_program(Function(rotated), x=X, angles=ANGLES)
    lowered = lower(Trace(raw, {}))
    assert lowered.skipped == ()
    assert (
        relative_error(run(lowered.trace.program, {"x": X[0], "angles": ANGLES[0]})[0], rotated(X[0], ANGLES[0])) < 1e-6
    )


def test_radii_parts_and_real_factors():
    def function(x: torch.Tensor, angles: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        z = torch.polar(angles.abs(), angles) * angles * torch.complex(angles, angles + 1)
        return z.real, z.imag + x.sum()

    program = check(function)
    assert not any(type_.dtype.startswith("complex") for type_ in program.values.values())


def test_a_complex_result_or_another_reader_leaves_all_as_it_is():
    def given(_: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
        return torch.polar(angles, angles)

    def read(_: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
        return torch.polar(angles, angles).abs()

    for function in (given, read):
        spelled = spell(raw_program(Function(function), x=X, angles=ANGLES))
        assert take_complex_numbers_apart(spelled) == spelled
