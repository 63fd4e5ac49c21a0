import pytest
import torch

from tune_model.tune.machine.cuda import offline_cuda, require_gpu
from tune_model.tune.machine.probe import TargetError, probe_target
from tune_model.tune.measuring.policy import policy_for
from tune_model.tune.target import CudaTarget

needs_no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="says what happens without a GPU")


def test_a_gpu_that_is_not_here_can_be_planned_for_but_not_measured():
    target = probe_target("cuda:sm_80")
    assert isinstance(target, CudaTarget)
    assert target.arch == 80
    assert target.shared_bytes == 163 << 10
    if not torch.cuda.is_available():
        with pytest.raises(TargetError, match="no such GPU"):
            require_gpu(target, 0)


@needs_no_gpu
def test_cuda_without_a_gpu_says_what_to_do():
    with pytest.raises(TargetError, match=r"sees no NVIDIA GPU.*target cpu"):
        probe_target("cuda")


@pytest.mark.parametrize("spec", ["gpu", "cuda:90", "cuda:sm_42", "cuda:sm_9", ""])
def test_unknown_targets_name_the_known_ones(spec: str):
    with pytest.raises(TargetError, match="expected"):
        probe_target(spec)


def test_a_large_model_is_measured_cold_and_a_small_one_as_it_leaves_the_cache():
    gpu = offline_cuda(90)
    assert policy_for(gpu, 15 << 30).rotate_bytes == 3 * gpu.l2_bytes
    assert policy_for(gpu, 1 + (16 << 20)).rotate_bytes == 32 << 20
    assert policy_for(gpu, 15 << 30).key == policy_for(gpu, 140 << 30).key != policy_for(gpu, 1 << 20).key


@pytest.mark.gpu
def test_this_machines_gpu_is_described():
    target = probe_target("cuda")
    assert isinstance(target, CudaTarget)
    assert target.sm_count > 0
    assert target.l2_bytes > 1 << 20
    assert target.max_clock_mhz > 500
    assert target.driver_branch.isdigit()
    require_gpu(target, 0)
