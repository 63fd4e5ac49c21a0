"""Generated C++ for pointwise chains: one loop over the result, blocks of it shared between threads."""

from collections.abc import Iterator

from tune_model.extract.task import Task
from tune_model.runtime.program import FormKind
from tune_model.tune.candidate import Built, Config, Effort, Rejected
from tune_model.tune.cpp.nests import build_nest, nest_for, nest_space
from tune_model.tune.target import CpuTarget, Target

__all__ = ["FAMILY", "CppPointwise"]


class CppPointwise:
    """See the module."""

    name = "cpp_pointwise"
    version = 2
    kinds: frozenset[FormKind] = frozenset({"pointwise"})

    def accepts(self, task: Task, target: Target) -> Rejected | None:
        """Accept what lowers to a nest without columns."""
        if task.form.kind != "pointwise":
            return Rejected("unsupported", f"a {task.form.kind}; expected a pointwise chain")
        nest = nest_for(task.form, target)
        if isinstance(nest, Rejected):
            return nest
        return Rejected("unsupported", "something is reduced") if nest.inner else None

    def start(self, task: Task, target: Target) -> Config:
        """Return two vectors per step, blocks of 16384 elements."""
        return next(self.configurations(task, target, Effort.QUICK))

    def configurations(self, task: Task, target: Target, effort: Effort) -> Iterator[Config]:
        """Yield what is near the start first."""
        nest = nest_for(task.form, target)
        if not isinstance(nest, Rejected) and isinstance(target, CpuTarget):
            yield from nest_space(nest, target, effort)

    def build(self, task: Task, config: Config, target: Target) -> Built | Rejected:
        """Print and compile."""
        return build_nest(task.form, config, target)


FAMILY = CppPointwise()
