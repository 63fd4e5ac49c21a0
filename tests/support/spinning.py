"""A kernel that runs in parallel, checked in a device process as a tuner does it."""

from tuning_fakes import TARGET, linear_plan

from tune_model.runtime.kernel import Kernel
from tune_model.runtime.program import Call, Ref
from tune_model.tune.candidate import Built, Candidate
from tune_model.tune.device import Bench
from tune_model.tune.measuring.policy import Policy, Rung
from tune_model.tune.measuring.worker import DeviceWorker
from tune_model.tune.target import CpuTarget

TWO_THREADS = CpuTarget("x86_64", TARGET.isa, "Test CPU", 2, 1 << 20, 1 << 25, "g++ 12.2", "2.13")


def check_a_parallel_kernel() -> str:
    """Return what the device says of a large matmul with two threads: `Passed`, or why it is rejected."""
    task = linear_plan(20_000).tasks[0].task
    rung = Rung(200.0, 3)
    transposed = Call("aten.t.default", (Ref("a1"),), results=("x",))
    product = Call("aten.mm.default", (Ref("a0"), Ref("x")), results=("t0",))
    device = DeviceWorker(TWO_THREADS)
    try:
        device.open(Bench(task, Policy("test", 1, 0, (rung,), rung), Built(Kernel(task.form.body), {}), 3))
        found = device.check(Candidate("parallel"), Built(Kernel((transposed, product)), {}))
    finally:
        device.close()
    return str(getattr(found, "reason", type(found).__name__))
