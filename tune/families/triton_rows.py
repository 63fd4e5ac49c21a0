"""Generated Triton for reductions over rows with the pointwise work around them: rows held whole, or read in a loop."""

from collections.abc import Iterator

from tune_model.extract.task import Task
from tune_model.runtime.program import Form, FormKind
from tune_model.tune.candidate import Built, Config, Effort, Rejected
from tune_model.tune.loops.ir import LoopNest
from tune_model.tune.loops.lower import lower
from tune_model.tune.loops.pieces import in_pieces
from tune_model.tune.loops.rounding import elide_rounding
from tune_model.tune.target import CudaTarget, Target
from tune_model.tune.triton.compile import Options
from tune_model.tune.triton.launch import Constant, KernelPlan, Launch, build_kernel
from tune_model.tune.triton.module import load_function
from tune_model.tune.triton.row_source import Loop, row_function
from tune_model.tune.triton.row_space import counted, geometry_of, row_space

__all__ = ["FAMILY", "TritonRows", "rows_of"]


def rows_of(form: Form, target: Target | None = None) -> LoopNest | Rejected:
    """Return the nest of rows and columns that a form is, without the roundings between calls; or why it is none."""
    if target is not None and not isinstance(target, CudaTarget):
        return Rejected("unsupported", "a CUDA kernel")
    if form.kind not in {"reduction", "pointwise"}:
        return Rejected("unsupported", f"a {form.kind}; expected a reduction")
    nest = lower(form)
    if isinstance(nest, Rejected):
        return nest
    if nest.inner == 0:
        return Rejected("unsupported", "nothing is reduced")
    nest = in_pieces(nest)
    shape = geometry_of(nest, form)
    if not shape.rows or not shape.width:
        return Rejected("unsupported", f"{shape.rows} rows of {shape.width} columns")
    return elide_rounding(nest)


class TritonRows:
    """See the module."""

    name = "triton_rows"
    version = 3
    kinds: frozenset[FormKind] = frozenset({"pointwise", "reduction"})

    def accepts(self, task: Task, target: Target) -> Rejected | None:
        """Accept what lowers to a nest with columns."""
        nest = rows_of(task.form, target)
        return nest if isinstance(nest, Rejected) else None

    def start(self, task: Task, target: Target) -> Config:
        """Return whole rows where they fit, with about 32 bytes per thread."""
        return next(self.configurations(task, target, Effort.QUICK))

    def configurations(self, task: Task, target: Target, effort: Effort) -> Iterator[Config]:
        """Yield tiles near the heuristic first."""
        nest = rows_of(task.form, target)
        if not isinstance(nest, Rejected) and isinstance(target, CudaTarget):
            yield from row_space(geometry_of(nest, task.form), target, effort)

    def plan(self, task: Task, config: Config) -> KernelPlan | Rejected:
        """State the launch without compiling."""
        nest = rows_of(task.form)
        if isinstance(nest, Rejected):
            return nest
        from tune_model.tune.triton.kernels import rows as kernels

        values = dict(config)
        rows, block = int(values["rows"]), int(values["block"])
        loop = Loop(int(values["stages"]), int(values["unroll"]))
        generated = row_function(nest, task.form, rows, block, loop)
        arguments = {
            "operands": generated.operands,
            "row_count": counted(generated.extent, geometry_of(nest, task.form)),
            "ROWS": Constant(rows),
            "BLOCK": Constant(block),
            "PDL": Constant(bool(values["pdl"])),
            "BODY": Constant(load_function(generated.source, "body")),
        }
        options = Options(int(values["num_warps"]), 1, programmatic=bool(values["pdl"]))
        launch = Launch(kernels.rows, arguments, (f"cdiv({generated.extent}, {rows})", 1, 1), options)
        return KernelPlan((launch,), requires=nest.requires)

    def build(self, task: Task, config: Config, target: Target) -> Built | Rejected:
        """Generate and compile."""
        return build_kernel(self.plan(task, config), target)


FAMILY = TritonRows()
