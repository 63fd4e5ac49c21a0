"""The project's bound on numbers, for tests: at most twice ATen's own distance from float64, and one unit more."""

import math
from collections.abc import Sequence

import torch
from form_builder import run_results

from tune_model.runtime.program import Form
from tune_model.tune.reference import compare, expect, tolerance

CPU = torch.device("cpu")


def assert_near(
    form: Form, inputs: Sequence[torch.Tensor], results: Sequence[torch.Tensor], units: float = 1.0
) -> float:
    """Compare with the body in float64 and with ATen's; returns the largest error as a share of what is allowed.

    NaN and infinities must lie where ATen has them, with its signs; integers and bools must be ATen's. `units` in the
    last place may be lost besides twice what ATen loses.
    """
    plain = run_results(form, [t.clone() for t in inputs])
    exact = expect(form, tuple(inputs), CPU)
    own, ours = (compare(list(r), list(inputs), exact) for r in (plain, results))
    worst = 0.0
    for place, (got, wanted, allowed) in enumerate(zip(results, plain, tolerance(form, own), strict=False)):
        assert got.dtype == wanted.dtype, place
        assert got.shape == wanted.shape, place
        if not wanted.is_floating_point():
            assert torch.equal(got, wanted), place
            continue
        special = ~torch.isfinite(wanted)
        assert torch.equal(special, ~torch.isfinite(got)), (place, wanted[special], got[special])
        assert torch.equal(got[special].nan_to_num(7.0), wanted[special].nan_to_num(7.0)), place
        if math.isinf(own.errors[place]):
            # ATen itself leaves what float64 can hold: then ATen's values count.
            torch.testing.assert_close(got, wanted, equal_nan=True)
            continue
        limit = allowed + (units - 1.0) * float(torch.finfo(got.dtype).eps)
        worst = max(worst, ours.errors[place] / limit)
        said = f"error {ours.errors[place]:.3g}, allowed {limit:.3g}, ATen's {own.errors[place]:.3g}"
        assert ours.errors[place] <= limit, (place, said)
    return worst
