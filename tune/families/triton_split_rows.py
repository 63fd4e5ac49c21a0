"""Generated Triton for few long rows: several programs share a row and leave partial results for the next launch.

An argmax over a vocabulary, a softmax over it, a sum over leading dims with few columns: the rows alone would leave
most of the device idle.
"""

from collections.abc import Iterator
from itertools import islice

from tune_model.extract.task import Task
from tune_model.runtime.program import FormKind
from tune_model.tune.candidate import Built, Config, Effort, Rejected
from tune_model.tune.families.triton_rows import rows_of
from tune_model.tune.target import CudaTarget, Target
from tune_model.tune.triton.compile import Options
from tune_model.tune.triton.launch import Constant, KernelPlan, Launch, build_kernel
from tune_model.tune.triton.module import load_function
from tune_model.tune.triton.row_source import Loop
from tune_model.tune.triton.row_space import counted, geometry_of, split_space
from tune_model.tune.triton.split_source import ends_with_row_values, split_functions

__all__ = ["FAMILY", "TritonSplitRows"]


class TritonSplitRows:
    """See the module."""

    name = "triton_split_rows"
    version = 3
    kinds: frozenset[FormKind] = frozenset({"pointwise", "reduction"})

    def accepts(self, task: Task, target: Target) -> Rejected | None:
        """Accept rows that are long, and too few to fill the device."""
        nest = rows_of(task.form, target)
        if isinstance(nest, Rejected):
            return nest
        if next(self.configurations(task, target, Effort.QUICK), None) is None:
            shape = geometry_of(nest, task.form)
            return Rejected("unsupported", f"{shape.rows} rows of {shape.width} columns need no splitting")
        return None

    def start(self, task: Task, target: Target) -> Config:
        """Return about two programs per multiprocessor."""
        return next(self.configurations(task, target, Effort.QUICK))

    def configurations(self, task: Task, target: Target, effort: Effort) -> Iterator[Config]:
        """Yield splits near the heuristic first."""
        nest = rows_of(task.form, target)
        if not isinstance(nest, Rejected) and isinstance(target, CudaTarget):
            shape, joins = geometry_of(nest, task.form), ends_with_row_values(nest, task.form)
            space = tuple(split_space(shape, target, effort, last_joins=joins))
            # A second launch costs least where it comes in while the first one drains.
            whole = split_space(shape, target, Effort.BALANCED, last_joins=joins)
            overlapped = (c for c in whole if ("pdl", True) in c and ("last_joins", False) in c)
            yield from tuple(dict.fromkeys((*islice(overlapped, 1), *space)))[: len(space)]

    def plan(self, task: Task, config: Config) -> KernelPlan | Rejected:
        """State the launches without compiling."""
        nest = rows_of(task.form)
        if isinstance(nest, Rejected):
            return nest
        from tune_model.tune.triton.kernels import rows as kernels

        values = dict(config)
        rows, block, pdl = int(values["rows"]), int(values["block"]), bool(values["pdl"])
        loop = Loop(int(values["stages"]), int(values["unroll"]))
        made, scratch, span = split_functions(
            nest, task.form, (rows, block), int(values["splits"]), loop, last_joins=bool(values["last_joins"])
        )
        launches = []
        for generated, splits in made:
            arguments = {
                "operands": generated.operands,
                "row_count": counted(generated.extent, geometry_of(nest, task.form)),
                "ROWS": Constant(rows),
                "BLOCK": Constant(block),
                "SPAN": Constant(span),
                "PDL": Constant(pdl),
                "BODY": Constant(load_function(generated.source, "body")),
            }
            # What only joins partial results holds no tile.
            warps = int(values["num_warps"]) if splits > 1 else 1
            grid = (f"cdiv({generated.extent}, {rows})", splits, 1)
            launches.append(Launch(kernels.split_rows, arguments, grid, Options(warps, 1, programmatic=pdl)))
        return KernelPlan(tuple(launches), scratch, requires=nest.requires)

    def build(self, task: Task, config: Config, target: Target) -> Built | Rejected:
        """Generate and compile."""
        return build_kernel(self.plan(task, config), target)


FAMILY = TritonSplitRows()
