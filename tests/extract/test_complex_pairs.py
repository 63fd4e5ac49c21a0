"""Complex arithmetic becomes real arithmetic, or stays where it cannot all become so."""

import pytest
import torch
from raw_programs import Example, Function, ops, raw_program, relative_error, run

from tune_model.extract.plan import lower
from tune_model.extract.rewrite.complex_pairs import take_complex_numbers_apart
from tune_model.extract.rewrite.spelling import spell
from tune_model.extract.tracing.front_end import Trace, TraceError
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


def test_a_table_of_complex_weights_is_read_as_pairs():
    """The first Llama multiplies by a table: it left the rotary embedding to ATen, one operator at a time."""
    raw = raw_program(
        Function(lambda x, turns: torch.view_as_real(torch.view_as_complex(x) * turns), (4,), dtype=torch.complex64),
        x=(normal(5, 4, 2), ("length", 4, 2)),
    )
    lowered = lower(Trace(raw, {}))
    assert [s.op for s in lowered.skipped] == ["aten.view_as_real.default"]
    turns = torch.randn(4, dtype=torch.complex64)
    (found,) = run(lowered.trace.program, {"x": normal(5, 4, 2)}, {"w0": turns})
    assert relative_error(found, torch.view_as_real(torch.view_as_complex(normal(5, 4, 2)) * turns)) < 1e-6


def test_what_stays_complex_is_in_no_region_and_the_plan_says_why():
    def given(x: torch.Tensor, angles: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.polar(angles, angles) * 2, x.relu() + 1

    lowered = lower(Trace(raw_program(Function(given), x=X, angles=ANGLES), {}))
    assert {s.op: s.reason for s in lowered.skipped} == {
        "aten.polar.default": "an operator without generated kernels",
        "aten.mul.Scalar": "computes with complex numbers, which generated kernels do not know",
    }
    (form,) = lowered.trace.program.forms.values()
    assert [c.op for c in form.body] == ["aten.relu.default", "aten.add.Scalar"]


def test_conjugates_are_computed_and_copies_as_real_numbers_are_no_identity():
    """Both are lazy views or named like one: the first was refused, the second gave its argument."""

    def function(_: torch.Tensor, angles: torch.Tensor) -> tuple[torch.Tensor, ...]:
        z = torch.polar(angles, angles)
        wide = z[:1].expand(3, -1).conj()
        return z.conj(), z.conj().imag, z @ z.mH, torch.view_as_real_copy(z), wide, wide.reshape(-1)

    program = lower(Trace(raw_program(Function(function), x=X, angles=ANGLES), {})).trace.program
    for found, expected in zip(
        run(program, {"x": X[0], "angles": ANGLES[0]}), function(*(X[0], ANGLES[0])), strict=True
    ):
        assert found.shape == expected.shape
        assert not found.is_conj()
        assert not found.is_neg()
        assert (found - expected).abs().max() < 1e-6


def test_numbers_that_no_artifact_holds_are_refused_before_tuning():
    def wide(_: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
        return torch.polar(angles.double(), angles.double())

    with pytest.raises(TraceError, match="is complex128, which no artifact holds; expected complex64, or pairs"):
        lower(Trace(raw_program(Function(wide), x=X, angles=ANGLES), {}))
