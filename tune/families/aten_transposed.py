"""The form's own ATen sequence over a weight that is stored as its transpose.

Libraries have other kernels for the other layout; 3 to 5 % on many prefill shapes (H200, cuBLAS 13). It also makes sure
that every task has something to run when a weight is transposed for another task's sake.
"""

from collections.abc import Iterator

import msgspec

from tune_model.extract.task import Task
from tune_model.runtime.program import FormKind
from tune_model.tune.candidate import Built, Config, Effort, Rejected
from tune_model.tune.families.aten import FAMILY as ATEN
from tune_model.tune.relayout import TRANSPOSED
from tune_model.tune.target import CudaTarget, Target
from tune_model.tune.triton.matmul_plan import transposed_weight

__all__ = ["FAMILY", "AtenTransposed"]


class AtenTransposed:
    """See the module."""

    name = "aten_transposed"
    version = 1
    kinds: frozenset[FormKind] = frozenset({"matmul"})

    def accepts(self, task: Task, target: Target) -> Rejected | None:
        """Accept a product with a weight."""
        if not isinstance(target, CudaTarget):
            return Rejected("unsupported", "a CPU packs its weights instead")
        weight = transposed_weight(task)
        return weight if isinstance(weight, Rejected) else None

    def start(self, task: Task, target: Target) -> Config:
        """Return the only configuration."""
        return ()

    def configurations(self, task: Task, target: Target, effort: Effort) -> Iterator[Config]:
        """Yield the only configuration."""
        yield ()

    def build(self, task: Task, config: Config, target: Target) -> Built | Rejected:
        """State the body as a kernel that wants the weight transposed."""
        weight = transposed_weight(task)
        if isinstance(weight, Rejected):
            return weight
        built = ATEN.build(task, (), target)
        if isinstance(built, Rejected):
            return built
        return msgspec.structs.replace(
            built, kernel=msgspec.structs.replace(built.kernel, layouts=((weight, TRANSPOSED),))
        )


FAMILY = AtenTransposed()
