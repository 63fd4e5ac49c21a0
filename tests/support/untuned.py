"""An extraction as if it had been tuned and the plain operators had won everywhere: no timing, no compiler."""

from tune_model.extract.task import Plan
from tune_model.package.system import probe_system
from tune_model.runtime.kernel import Kernel
from tune_model.tune.candidate import Candidate
from tune_model.tune.choice import Choice, Tuning
from tune_model.tune.target import CpuTarget


def untuned(plan: Plan) -> Tuning:
    """The outcome for this machine's CPU."""
    system = probe_system("cpu")
    target = CpuTarget(system.machine, (), system.name, system.threads, 1 << 20, 1 << 25, "g++", system.torch)
    choices = tuple(
        Choice(planned.key, Candidate("aten"), Kernel(planned.task.form.body), 1.0, 1.0, 1.0, 1.0, (), (), "no gain")
        for planned in plan.tasks
    )
    return Tuning(plan, target, choices, {}, 0, 0, 0.0)
