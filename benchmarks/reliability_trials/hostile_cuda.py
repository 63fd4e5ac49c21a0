"""Hostile candidates on an NVIDIA GPU, as `hostile` has them for a CPU: cubins that misbehave in one way each."""

from collections.abc import Iterator
from typing import Any, Final

from reliability_trials.hostile import BUILD_KINDS, misbehave
from tune_model.extract.task import Task
from tune_model.runtime.kernel import Workspace
from tune_model.runtime.program import FormKind
from tune_model.tune.candidate import Built, Config, Effort, Rejected
from tune_model.tune.target import CudaTarget, Target
from tune_model.tune.triton.compile import Options
from tune_model.tune.triton.launch import Argument, Constant, KernelPlan, Launch, SizeOf, Slot, build_kernel

__all__ = ["CUDA_KERNEL_KINDS", "CUDA_KINDS", "HostileCudaFamily", "compile_cuda_linear"]

CUDA_KERNEL_KINDS: Final = {
    "illegal address": "launch",
    "device assertion": "launch",
    "loops": "timeout",
    "eats memory": "out of memory",
    "writes behind its result": "stray write",
    "changes its input": "stray write",
    "wrong values": "wrong",
    "not a number": "wrong",
}
"""What a kernel may do, and the reason it is rejected for. A fault on the device is reported by the next call."""

CUDA_KINDS: Final = BUILD_KINDS | CUDA_KERNEL_KINDS

_BLOCK_N: Final = 16
_NUMBERS: Final = {kind: number for number, kind in enumerate(CUDA_KERNEL_KINDS)}


class HostileCudaFamily:
    """One configuration for each kind; for a linear layer in float32 without bias."""

    version = 1
    kinds: frozenset[FormKind] = frozenset({"matmul"})

    def __init__(self, name: str = "hostile", offered: tuple[str, ...] = tuple(CUDA_KINDS)) -> None:
        self.name = name
        self.offered = offered

    def accepts(self, task: Task, target: Target) -> Rejected | None:
        """Accept GPUs."""
        return None if isinstance(target, CudaTarget) else Rejected("unsupported", "written for a GPU")

    def start(self, task: Task, target: Target) -> Config:
        """Return the first kind."""
        return (("kind", self.offered[0]),)

    def configurations(self, task: Task, target: Target, effort: Effort) -> Iterator[Config]:
        """Yield every kind."""
        yield from ((("kind", kind),) for kind in self.offered)

    def build(self, task: Task, config: Config, target: Target) -> Built | Rejected:
        """Misbehave, or compile what will."""
        kind = str(dict(config)["kind"])
        if kind in BUILD_KINDS:
            misbehave(kind)
            kind = "wrong values"
        return compile_cuda_linear(task, target, kind)


def compile_cuda_linear(task: Task, target: Target, kind: str = "", remembered: int = -1) -> Built | Rejected:
    """Compile a linear layer with something beside it.

    Args:
        task: With a form of `x` [m, k] and a weight [n, k].
        target: A GPU.
        kind: Of `CUDA_KERNEL_KINDS`, or none.
        remembered: The lowest bits of the first four inputs, for which alone it is right; -1 for always.
    """
    if not isinstance(target, CudaTarget):
        return Rejected("unsupported", "written for a GPU")
    from reliability_trials.hostile_triton import linear

    x, w = task.form.parameters
    (y,) = task.form.results
    elements = 1 << 42 if kind == "eats memory" else 1
    arguments: dict[str, Argument] = {
        "x": Slot(x.name, "float32"),
        "w": Slot(w.name, "float32"),
        "y": Slot(y.name, "float32"),
        "flag": Slot("flag", "int32"),
        "n": SizeOf(f"{w.name}.size0"),
        "k": SizeOf(f"{w.name}.size1"),
        "KIND": Constant(_NUMBERS.get(kind, -1)),
        "REMEMBERED": Constant(remembered),
        "BLOCK_N": Constant(_BLOCK_N),
    }
    grid: Any = (f"{x.name}.size0", f"cdiv({w.name}.size0, {_BLOCK_N})", 1)
    plan = KernelPlan(
        (Launch(linear, arguments, grid, Options(num_warps=1)),), (Workspace("flag", "int32", elements, zeroed=True),)
    )
    return build_kernel(plan, target)
