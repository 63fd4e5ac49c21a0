"""Random regions as Triton kernels, interpreted, against ATen and float64."""

import pytest
from interpreted import interpret
from region_trials import Trial, trial, triton_plan


@pytest.mark.parametrize("seed", range(40))
def test_interpreted(seed: int):
    one = trial(seed)
    assert isinstance(one, Trial), one
    one.require(interpret(triton_plan(one), one.form, one.inputs()))
