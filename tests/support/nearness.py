"""The project's bound on numbers, for tests: at most twice ATen's own distance from float64, and one unit more."""

import math
from collections.abc import Sequence

import torch
from form_builder import run_results

from tune_model.runtime.program import Form
from tune_model.tune.measuring.reference import expect

CPU = torch.device("cpu")


def assert_near(
    form: Form, inputs: Sequence[torch.Tensor], results: Sequence[torch.Tensor], units: float = 1.0
) -> float:
    """Compare with the body in float64 and with ATen's; returns the largest error as a share of what is allowed.

    NaN and infinities must lie where ATen has them, with its signs, except where only a rounding in the middle made
    them: there the exact value is right too. Integers and bools must be ATen's. `units` in the last place may be lost
    besides twice what ATen loses.
    """
    plain = run_results(form, [t.clone() for t in inputs])
    worst = 0.0
    for place, (got, wanted, exact) in enumerate(
        zip(results, plain, expect(form, tuple(inputs), CPU).results, strict=True)
    ):
        assert got.dtype == wanted.dtype, place
        assert got.shape == wanted.shape, place
        if not wanted.is_floating_point():
            assert torch.equal(got, wanted), place
            continue
        worst = max(worst, _share(got, wanted, exact, units))
    return worst


def _share(got: torch.Tensor, wanted: torch.Tensor, exact: torch.Tensor, units: float) -> float:
    rounded = exact.to(wanted.dtype)
    special = ~torch.isfinite(wanted)
    avoidable = special & torch.isfinite(rounded)
    held = torch.where(avoidable & torch.isfinite(got), rounded, wanted)
    special = ~torch.isfinite(held)
    assert torch.equal(special, ~torch.isfinite(got)), (wanted[special], got[special])
    assert torch.equal(got[special].nan_to_num(7.0), held[special].nan_to_num(7.0)), (wanted[special], got[special])
    finite = torch.isfinite(got) & torch.isfinite(exact)
    own, ours = (_error(x[finite & ~avoidable], exact[finite & ~avoidable]) for x in (wanted, got))
    limit = 2.0 * own + units * float(torch.finfo(got.dtype).eps)
    assert ours <= limit, f"error {ours:.3g}, allowed {limit:.3g}, ATen's {own:.3g}"
    eps = float(torch.finfo(got.dtype).eps)
    torch.testing.assert_close(got[avoidable & finite], rounded[avoidable & finite], rtol=8 * eps, atol=8 * eps)
    return ours / limit


def _error(found: torch.Tensor, exact: torch.Tensor) -> float:
    """Relative Frobenius error."""
    size = float(torch.linalg.vector_norm(exact))
    difference = float(torch.linalg.vector_norm(found.double() - exact))
    assert not math.isnan(difference)
    return difference / size if size > 0 else difference
