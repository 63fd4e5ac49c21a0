"""Generated C++ for reductions over rows with the pointwise work around them: rows shared between threads."""

from collections.abc import Iterator

from tune_model.extract.task import Task
from tune_model.runtime.program import FormKind
from tune_model.tune.candidate import Built, Config, Effort, Rejected
from tune_model.tune.cpp.nests import build_nest, nest_for, nest_space
from tune_model.tune.target import CpuTarget, Target

__all__ = ["FAMILY", "CppRows"]


class CppRows:
    """See the module."""

    name = "cpp_rows"
    version = 2
    kinds: frozenset[FormKind] = frozenset({"pointwise", "reduction"})

    def accepts(self, task: Task, target: Target) -> Rejected | None:
        """Accept what lowers to a nest with columns."""
        if task.form.kind not in {"reduction", "pointwise"}:
            return Rejected("unsupported", f"a {task.form.kind}; expected a reduction")
        nest = nest_for(task.form, target)
        if isinstance(nest, Rejected):
            return nest
        return None if nest.inner else Rejected("unsupported", "nothing is reduced")

    def start(self, task: Task, target: Target) -> Config:
        """Return two vectors per step, costly values kept between passes."""
        return next(self.configurations(task, target, Effort.QUICK))

    def configurations(self, task: Task, target: Target, effort: Effort) -> Iterator[Config]:
        """Yield what is near the start first."""
        nest = nest_for(task.form, target)
        if not isinstance(nest, Rejected) and isinstance(target, CpuTarget):
            yield from nest_space(nest, target, effort)

    def build(self, task: Task, config: Config, target: Target) -> Built | Rejected:
        """Print and compile."""
        return build_nest(task.form, config, target)


FAMILY = CppRows()
