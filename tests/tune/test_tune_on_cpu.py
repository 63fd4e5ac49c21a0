"""The whole tuner with the real families on this machine's CPU, in this process and isolated."""

from pathlib import Path

import pytest
import torch
from tuning_fakes import linear_plan, without_times

from tune_model.runtime.execution.binding import bind_kernel
from tune_model.tune.candidate import Effort
from tune_model.tune.machine.probe import probe_target
from tune_model.tune.options import TuneOptions
from tune_model.tune.relayout import relaid_form, relay
from tune_model.tune.tuner import tune


@pytest.mark.parametrize(("isolate", "sizes"), [(False, (24,)), (True, (1, 24))], ids=["here", "isolated"])
def test_choices_compute_what_the_plan_says_and_a_second_run_repeats_them(
    tmp_path: Path, isolate: bool, sizes: tuple[int, ...]
):
    plan = linear_plan(*sizes)
    target = probe_target("cpu")
    options = TuneOptions(tmp_path / "records.sqlite", tmp_path / "kernels", Effort.QUICK, isolate=isolate)
    tuning = tune(plan, target, options, lambda _event: None)
    assert {choice.status for choice in tuning.choices} <= {"tuned", "no gain", "layout", "disturbed"}
    for planned, choice in zip(plan.tasks, tuning.choices, strict=True):
        form = planned.task.form
        x, w = torch.randn(form.parameters[0].type.shape), torch.randn(32, 16)  # type: ignore[arg-type]
        inputs = relay(form, (x, w), choice.kernel.layouts)
        run = bind_kernel(choice.kernel, relaid_form(form, choice.kernel.layouts), tuning.code, torch.device("cpu"))
        (found,) = run(inputs)
        torch.testing.assert_close(found, (x.double() @ w.double().T).float(), rtol=1e-5, atol=1e-5)
        assert choice.median_us > 0
        assert choice.baseline_us > 0
    again = tune(plan, target, options, lambda _event: None)
    assert (again.builds, again.measured) == (0, 0)
    assert without_times(again) == without_times(tuning)
