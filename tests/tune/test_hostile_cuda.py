"""The hostile kernels of a GPU: compiled for one here; raced on one between good candidates where there is one."""

from pathlib import Path

import pytest
from devices import cuda_target
from reliability_trials.hostile_cuda import CUDA_KERNEL_KINDS, CUDA_KINDS, HostileCudaFamily
from tuning_fakes import linear_plan

from tune_model.tune.candidate import Built, Candidate, Rejected
from tune_model.tune.device import Bench, Passed, Samples
from tune_model.tune.families import families_for
from tune_model.tune.families.aten import FAMILY as ATEN
from tune_model.tune.machine.probe import probe_target
from tune_model.tune.measuring.interval import percentile
from tune_model.tune.measuring.policy import policy_for
from tune_model.tune.measuring.worker import DeviceWorker
from tune_model.tune.options import TuneOptions
from tune_model.tune.target import CudaTarget
from tune_model.tune.tuner import tune_with
from tune_model.tune.workshop import Workshop

PLAN = linear_plan(8)
TASK = PLAN.tasks[0].task


@pytest.mark.parametrize("kind", CUDA_KERNEL_KINDS)
def test_the_kernels_compile(kind: str):
    built = HostileCudaFamily().build(TASK, (("kind", kind),), cuda_target(90))
    assert isinstance(built, Built), built
    assert len(built.code) == 1


@pytest.fixture(scope="module")
def target() -> CudaTarget:
    found = probe_target("cuda")
    assert isinstance(found, CudaTarget)
    return found


@pytest.mark.gpu
def test_each_costs_only_itself_and_the_race_goes_on(target: CudaTarget, tmp_path: Path):
    device = DeviceWorker(target, step_s=15.0)
    options = TuneOptions(tmp_path / "records.sqlite", tmp_path / "kernels", build_workers=4, build_timeout_s=30.0)
    families = (ATEN, HostileCudaFamily(), *families_for(target)[1:])
    (choice,) = tune_with(PLAN, Workshop(families, target, device, options, lambda _event: None)).choices
    found = {dict(c.config).get("kind"): r for c, r in choice.rejections if c.family == "hostile"}
    assert {kind: found[kind].reason for kind in CUDA_KINDS} == CUDA_KINDS, found
    assert choice.winner.family != "hostile"
    assert choice.status in {"tuned", "no gain"}


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["illegal address", "device assertion", "loops"])
def test_later_timings_are_as_before(target: CudaTarget, kind: str):
    policy = policy_for(target, 16 << 30)
    baseline = ATEN.build(TASK, (), target)
    hostile = HostileCudaFamily().build(TASK, (("kind", kind),), target)
    assert isinstance(baseline, Built)
    assert isinstance(hostile, Built)
    worker = DeviceWorker(target, step_s=15.0)

    def median() -> float:
        samples = worker.time(Candidate("aten"), baseline, policy.rungs[1])
        assert isinstance(samples, Samples), samples
        return percentile(samples.us, 0.5)

    try:
        assert isinstance(worker.open(Bench(TASK, policy, baseline, 1)), Passed)
        before = median()
        rejected = worker.check(Candidate("hostile", (("kind", kind),)), hostile)
        assert isinstance(rejected, Rejected)
        assert rejected.reason == CUDA_KERNEL_KINDS[kind], rejected
        assert worker.replaced == 1
        assert median() == pytest.approx(before, rel=0.1)
    finally:
        worker.close()
