"""Accuracy of the header's own float32 functions, and of conversions, against float64 and torch."""

import math

import pytest
import torch
from cpp_kernels import Library
from form_builder import FormBuilder

from tune_model.runtime.program import Form
from tune_model.tune.cpp.columns import Shape
from tune_model.tune.loops.lower import lower
from tune_model.tune.machine.cpu import probe_cpu

COUNT = 400_003
FUNCTIONS = ("exp", "erf", "tanh", "sigmoid")


def functions() -> Form:
    b = FormBuilder()
    x = b.input((COUNT,))
    return b.form(*(b.call(f"{name}.default", x) for name in FUNCTIONS))


def conversions() -> Form:
    b = FormBuilder()
    x = b.input((COUNT,))
    return b.form(*(b.call("_to_copy.default", x, dtype=d) for d in (torch.bfloat16, torch.float16)))


@pytest.fixture(scope="module")
def library() -> Library:
    forms = {"functions": functions(), "conversions": conversions()}
    return Library({name: lower(form) for name, form in forms.items()}, probe_cpu(), Shape())


def spread() -> torch.Tensor:
    """Every size of number that matters, of both signs."""
    generator = torch.Generator().manual_seed(0)
    size = torch.exp2(torch.rand(COUNT, generator=generator, dtype=torch.float64) * 60 - 50)
    sign = torch.randint(0, 2, (COUNT,), generator=generator) * 2 - 1
    return (size * sign).float()


def units(got: torch.Tensor, exact: torch.Tensor) -> torch.Tensor:
    """Error in units in the last place of float32."""
    _, exponent = torch.frexp(exact)
    unit = torch.exp2((exponent - 24).clamp(min=-149).double())
    return (got.double() - exact).abs() / unit


@pytest.mark.parametrize(
    ("name", "worst", "average"), [("exp", 1.5, 0.3), ("erf", 6.0, 0.7), ("tanh", 2.0, 0.3), ("sigmoid", 2.5, 0.4)]
)
def test_within_units_in_the_last_place(library: Library, name: str, worst: float, average: float) -> None:
    x = spread()
    got = library.run("functions", functions(), [x])[FUNCTIONS.index(name)]
    exact = getattr(torch, name)(x.double())
    inside = (exact.abs() <= torch.finfo(torch.float32).max) & (exact.abs() > 1e-45)
    if name == "sigmoid":  # as 1 / (1 + exp(-x)), ATen's too, it is 0 where the result would be denormal
        inside &= exact > torch.finfo(torch.float32).tiny
    error = units(got, exact)[inside]
    assert error.max() <= worst
    assert error.mean() <= average
    assert torch.equal(got[exact.abs() > 3.5e38], torch.full_like(got[exact.abs() > 3.5e38], math.inf))


def test_saturation_is_exact(library: Library) -> None:
    """GELU needs 1 + erf(x) to be 0 for large negative x."""
    x = torch.full((COUNT,), 4.0)
    x[1::2] *= -1
    x[: COUNT // 2] *= 3
    _, erf, tanh, _ = library.run("functions", functions(), [x])
    assert torch.equal(erf, x.sign())
    assert torch.equal(tanh[: COUNT // 2], x[: COUNT // 2].sign())


def test_conversions_round_as_torch(library: Library) -> None:
    x = spread()
    bits = torch.randint(-(2**31), 2**31, (COUNT // 2,), generator=torch.Generator().manual_seed(1), dtype=torch.int64)
    x[: COUNT // 2] = bits.to(torch.int32).view(torch.float32)
    for got, dtype in zip(library.run("conversions", conversions(), [x]), (torch.bfloat16, torch.float16), strict=True):
        expected = x.to(dtype)
        nan = expected.isnan()
        assert torch.equal(got.isnan(), nan)
        assert torch.equal(got[~nan], expected[~nan])
