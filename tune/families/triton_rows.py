"""Generated Triton for reductions over rows with the pointwise work around them: rows held whole, or read in a loop."""

import math
from collections.abc import Iterator

from tune_model.extract.task import Task
from tune_model.runtime.expression import evaluate, product
from tune_model.runtime.program import FormKind
from tune_model.runtime.replay import slot_sizes
from tune_model.tune.candidate import Built, Config, Effort, Rejected
from tune_model.tune.loops.ir import LoopNest
from tune_model.tune.loops.lower import lower
from tune_model.tune.search_order import thin, with_dependent_launch
from tune_model.tune.target import CudaTarget, Target
from tune_model.tune.triton.compile import Options
from tune_model.tune.triton.launch import Constant, KernelPlan, Launch, SizeOf, build_kernel
from tune_model.tune.triton.module import load_function
from tune_model.tune.triton.row_source import row_function

__all__ = ["FAMILY", "TritonRows"]

_ROWS = (1, 2, 4, 8, 16, 32, 64, 128)
_WARPS = (1, 2, 4, 8, 16, 32)
_SMALLEST_BLOCK = 64
_MOST_ELEMENTS = 65536
"""Of a tile; more does not fit the registers of any block."""


class TritonRows:
    """See the module."""

    name = "triton_rows"
    version = 1
    kinds: frozenset[FormKind] = frozenset({"pointwise", "reduction"})

    def accepts(self, task: Task, target: Target) -> Rejected | None:
        """Accept what lowers to a nest with columns."""
        if not isinstance(target, CudaTarget):
            return Rejected("unsupported", "a CUDA kernel")
        if task.form.kind not in {"reduction", "pointwise"}:
            return Rejected("unsupported", f"a {task.form.kind}; expected a reduction")
        nest = lower(task.form)
        if isinstance(nest, Rejected):
            return nest
        if nest.inner == 0:
            return Rejected("unsupported", "nothing is reduced")
        rows, width = _shape(task, nest)
        return None if rows and width else Rejected("unsupported", f"{rows} rows of {width} columns")

    def start(self, task: Task, target: Target) -> Config:
        """Return whole rows where they fit, with about eight elements per thread."""
        return next(self.configurations(task, target, Effort.QUICK))

    def configurations(self, task: Task, target: Target, effort: Effort) -> Iterator[Config]:
        """Yield tiles near the heuristic first."""
        nest = lower(task.form)
        if isinstance(nest, Rejected) or not isinstance(target, CudaTarget):
            return
        rows, width = _shape(task, nest)
        whole = _power_of_two(width)
        blocks = [b for b in (_SMALLEST_BLOCK << i for i in range(9)) if b < whole]
        if whole <= _MOST_ELEMENTS:
            blocks.append(whole)
        spaces: list[Config] = [
            (("rows", r), ("block", block), ("num_warps", warps))
            for r in _ROWS
            for block in blocks
            for warps in _WARPS
            if r * block <= _MOST_ELEMENTS and r <= 2 * rows and 0.5 <= r * block / (32 * warps) <= 256
        ]
        ordered = sorted(spaces, key=lambda c: _distance(c, rows, whole, target))
        yield from thin(with_dependent_launch(ordered, offered=target.arch >= 90), effort)

    def plan(self, task: Task, config: Config) -> KernelPlan | Rejected:
        """State the launch without compiling."""
        nest = lower(task.form)
        if isinstance(nest, Rejected):
            return nest
        from tune_model.tune.triton.kernels import rows as kernels

        values = dict(config)
        rows, block = int(values["rows"]), int(values["block"])
        generated = row_function(nest, task.form, rows, block)
        arguments = {
            "operands": generated.operands,
            "row_count": SizeOf(generated.extent),
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
        plan = self.plan(task, config)
        if isinstance(plan, Rejected) or not isinstance(target, CudaTarget):
            return plan if isinstance(plan, Rejected) else Rejected("unsupported", "a CUDA kernel")
        return build_kernel(plan, target)


def _shape(task: Task, nest: LoopNest) -> tuple[int, int]:
    """Return how many rows and columns the task has."""
    values = slot_sizes(task.form)
    split = len(nest.axes) - nest.inner
    rows = evaluate(product(tuple(a.extent for a in nest.axes[:split])), values)
    return rows, evaluate(product(tuple(a.extent for a in nest.axes[split:])), values)


def _power_of_two(value: int) -> int:
    return 1 << max(0, value - 1).bit_length()


def _distance(config: Config, rows: int, whole: int, target: CudaTarget) -> float:
    """Say how far a tile is from the heuristic, in notches; the nearest is tried first."""
    values = {name: int(value) for name, value in config}
    tile = values["rows"] * values["block"]
    if whole <= 16384:
        wanted_block = whole
        # Short rows are packed to about 2048 elements, while every multiprocessor still gets four programs.
        wanted_rows = max(1, min(2048 // whole, rows // (4 * target.sm_count)))
    else:
        wanted_block, wanted_rows = 8192, 1
    wanted_warps = min(32, max(1, wanted_rows * wanted_block // 256))
    apart = abs(math.log2(values["block"] / wanted_block)) + abs(math.log2(values["rows"] / max(1, wanted_rows)))
    return apart + abs(math.log2(values["num_warps"] / wanted_warps)) + (0.5 if tile < 256 else 0.0)


FAMILY = TritonRows()
