"""Random regions as Triton kernels, compiled for Hopper; what they compute is for the interpreter to say."""

import pytest
from devices import cuda_target
from region_trials import Trial, compiled_choice, trial

from tune_model.extract.task import NumericRules, Task
from tune_model.tune.building.built_file import build_candidate
from tune_model.tune.candidate import Built, Candidate


@pytest.mark.parametrize("seed", range(40))
def test_compiles(seed: int):
    one = trial(seed)
    assert isinstance(one, Trial), one
    candidate = Candidate(*compiled_choice(one, cuda_target()))
    built = build_candidate(Task(one.form, NumericRules()), candidate, cuda_target())
    assert isinstance(built, Built), built
