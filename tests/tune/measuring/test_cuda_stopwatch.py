"""Timing on a real GPU: known answers from bytes and operations, cold against warm, and faults."""

from collections.abc import Iterator

import msgspec
import pytest
from tuning_fakes import linear_plan

from tune_model.extract.task import NumericRules, Task
from tune_model.runtime.kernel import Kernel
from tune_model.runtime.program import Call, Form, Items, Parameter, Ref, TensorType, bind_form
from tune_model.tune.candidate import Built, Candidate, Rejected
from tune_model.tune.device import Bench, Device, Passed, Samples
from tune_model.tune.machine.probe import probe_target
from tune_model.tune.measuring.interval import percentile
from tune_model.tune.measuring.policy import policy_for
from tune_model.tune.measuring.worker import DeviceWorker
from tune_model.tune.target import CudaTarget

pytestmark = pytest.mark.gpu

EXTERN = Candidate("aten")


def linear(m: int, n: int, k: int) -> Form:
    parameters = (
        Parameter("a0", TensorType("bfloat16", (m, k))),
        Parameter("a1", TensorType("bfloat16", (n, k)), "weight"),
    )
    call = Call("aten.linear.default", (Ref("a0"), Ref("a1")), results=("t0",))
    return Form("matmul", (), parameters, (call,), (Parameter("t0", TensorType("bfloat16", (m, n))),))


@pytest.fixture(scope="module")
def target() -> CudaTarget:
    found = probe_target("cuda")
    assert isinstance(found, CudaTarget)
    return found


@pytest.fixture(scope="module")
def device(target: CudaTarget) -> Iterator[Device]:
    worker = DeviceWorker(target)
    yield worker
    worker.close()


def open_bench(device: Device, target: CudaTarget, form: Form, program_bytes: int = 16 << 30) -> Built:
    built = Built(Kernel(form.body), {})
    opened = device.open(Bench(Task(form, NumericRules()), policy_for(target, program_bytes), built, 1))
    assert isinstance(opened, Passed), opened
    return built


def median(samples: Samples | Rejected) -> float:
    assert isinstance(samples, Samples), samples
    return percentile(samples.us, 0.5)


def test_a_cold_gemv_cannot_be_faster_than_memory_and_is_not_much_slower(device: Device, target: CudaTarget):
    form = linear(1, 28672, 4096)
    built = open_bench(device, target, form)
    policy = policy_for(target, 16 << 30)
    us = median(device.time(EXTERN, built, policy.rungs[0]))
    bandwidth = 28672 * 4096 * 2 / us * 1e6
    assert 1e12 < bandwidth < 6e12


def test_a_weight_that_stays_in_the_cache_is_faster(device: Device, target: CudaTarget):
    form = linear(1, 1024, 4096)
    rung = policy_for(target, 0).rungs[1]
    built = open_bench(device, target, form)
    cold = median(device.time(EXTERN, built, rung))
    built = open_bench(device, target, form, program_bytes=8 << 20)
    warm = median(device.time(EXTERN, built, rung))
    assert warm < cold


def test_the_same_kernel_twice_is_a_tie(device: Device, target: CudaTarget):
    built = open_bench(device, target, linear(512, 4096, 4096))
    a, b = device.compare(((EXTERN, built), (Candidate("twin"), built)), policy_for(target, 16 << 30).final)
    assert median(a) == pytest.approx(median(b), rel=0.03)


def test_times_repeat(device: Device, target: CudaTarget):
    built = open_bench(device, target, linear(16, 4096, 4096))
    rung = policy_for(target, 16 << 30).rungs[1]
    times = [median(device.time(EXTERN, built, rung)) for _ in range(5)]
    assert max(times) / min(times) < 1.05


def test_a_candidate_that_raises_is_out(device: Device, target: CudaTarget):
    form = linear(4, 64, 64)
    open_bench(device, target, form)
    raises = Built(Kernel((Call("aten.mm.default", (Ref("a0"), Ref("a0")), results=("t0",)),)), {})
    found = device.check(Candidate("raises"), raises)
    assert isinstance(found, Rejected)
    assert found.reason == "launch"


def test_a_candidate_that_cannot_be_captured_is_out_and_the_next_is_fine(device: Device, target: CudaTarget):
    """Indexing with a mask waits for the device, which a graph cannot hold."""
    form = linear(4, 64, 64)
    built = open_bench(device, target, form)
    rung = policy_for(target, 0).rungs[0]
    mask = Call("aten.gt.Scalar", (Ref("a0"), -1e9), results=("mask",))
    waits = Call("aten.index.Tensor", (Ref("a0"), Items((Ref("mask"),))), results=("x",))
    syncs = Built(Kernel((mask, waits, *form.body)), {})
    assert isinstance(device.check(Candidate("syncs"), syncs), Passed)
    found = device.time(Candidate("syncs"), syncs, rung)
    assert isinstance(found, Rejected)
    assert found.reason == "launch"
    assert isinstance(device.time(EXTERN, built, rung), Samples)


def test_a_task_that_does_not_fit_is_out_of_memory(device: Device, target: CudaTarget):
    form = bind_form(linear_plan(1).programs[0].forms[linear_plan(1).tasks[0].sites[0].form], (1 << 36,))
    opened = device.open(Bench(Task(form, NumericRules()), policy_for(target, 0), Built(Kernel(form.body), {}), 1))
    assert isinstance(opened, Rejected)
    assert opened.reason == "out of memory"
    assert msgspec.structs.asdict(opened)["detail"]
