"""MKL's packed float32 linear layer, prepared for one number of rows.

The layout is tied to that number: it is of use where a weight is only ever read with it (a program without symbolic
sizes), which the choice of layouts sees to; for a symbolic form there is no fallback on such a weight, so it is not
chosen. MKL also wants the plain weight, for other numbers of rows; it gets a stand-in of the right sizes, one element
in memory, that is never read because `requires` fixes the rows.
"""

from collections.abc import Iterator

from tune_model.extract.task import Task
from tune_model.runtime.kernel import Kernel, Within
from tune_model.runtime.program import Arg, Call, FormKind, Items, Ref
from tune_model.tune.candidate import Built, Config, Effort, Rejected
from tune_model.tune.loops.rest import MatmulParts, take_apart
from tune_model.tune.target import CpuTarget, Target

__all__ = ["FAMILY", "MklLinear"]


class MklLinear:
    """See the module."""

    name = "mkl_linear"
    version = 1
    kinds: frozenset[FormKind] = frozenset({"matmul"})

    def accepts(self, task: Task, target: Target) -> Rejected | None:
        """Accept float32 linear layers where MKL is the BLAS."""
        if not isinstance(target, CpuTarget) or target.machine != "x86_64":
            return Rejected("unsupported", "a kernel for x86-64 CPUs")
        parts = take_apart(task.form)
        if isinstance(parts, Rejected):
            return parts
        if parts.type.dtype != "float32":
            return Rejected("unsupported", f"MKL packs float32, not {parts.type.dtype}")
        return Rejected("unsupported", "an empty matmul") if 0 in (parts.m, parts.n, parts.k) else None

    def start(self, task: Task, target: Target) -> Config:
        """Return the only configuration."""
        return ()

    def configurations(self, task: Task, target: Target, effort: Effort) -> Iterator[Config]:
        """Yield the only configuration."""
        yield ()

    def build(self, task: Task, config: Config, target: Target) -> Built | Rejected:
        """State the calls."""
        parts = take_apart(task.form)
        if isinstance(parts, Rejected):
            return parts
        requires = (Within(f"{parts.a}.size0", parts.m, parts.m),)
        layouts = ((parts.weight, f"mkl:{parts.m}"),)
        return Built(Kernel((*_calls(parts), *parts.rest), layouts=layouts, requires=requires), {})


def _calls(parts: MatmulParts) -> tuple[Call, ...]:
    bias: Arg = Ref(parts.bias) if parts.bias else None
    element, plain = "stand_in_element", "stand_in"
    return (
        Call("aten.new_empty.default", (Ref(parts.a), Items((1, 1))), results=(element,)),
        Call("aten.expand.default", (Ref(element), Items((parts.n, parts.k))), results=(plain,)),
        Call(
            "mkl._mkl_linear.default",
            (Ref(parts.a), Ref(parts.weight), Ref(plain), bias, parts.m),
            results=(parts.product,),
        ),
    )


FAMILY = MklLinear()
