"""Generated Triton for pointwise chains: one pass over the flattened index space."""

import math
from collections.abc import Iterator

from tune_model.extract.task import Task
from tune_model.runtime.expression import evaluate, product
from tune_model.runtime.kernel import Requirement, Within
from tune_model.runtime.program import Form, FormKind
from tune_model.runtime.replay import slot_sizes
from tune_model.tune.candidate import Built, Config, Effort, Rejected
from tune_model.tune.loops.ir import LoopNest
from tune_model.tune.loops.lower import lower
from tune_model.tune.loops.pieces import in_pieces
from tune_model.tune.loops.rounding import elide_rounding
from tune_model.tune.search.order import LIMITS, thin, with_dependent_launch
from tune_model.tune.target import CudaTarget, Target
from tune_model.tune.triton.compile import Options
from tune_model.tune.triton.launch import Constant, KernelPlan, Launch, build_kernel
from tune_model.tune.triton.module import load_function
from tune_model.tune.triton.row_source import element_count, pointwise_function

__all__ = ["FAMILY", "TritonPointwise"]

_BLOCKS = (64, 128, 256, 512, 1024, 2048, 4096, 8192)
_WARPS = (1, 2, 4, 8, 16)
_LARGEST_INDEX = 2**31 - 8192


class TritonPointwise:
    """See the module."""

    name = "triton_pointwise"
    version = 3
    kinds: frozenset[FormKind] = frozenset({"pointwise", "reduction"})

    def accepts(self, task: Task, target: Target) -> Rejected | None:
        """Accept what lowers to a nest without columns."""
        if not isinstance(target, CudaTarget):
            return Rejected("unsupported", "a CUDA kernel")
        if task.form.kind not in {"reduction", "pointwise"}:
            return Rejected("unsupported", f"a {task.form.kind}; expected a pointwise chain")
        nest = _nest(task.form)
        if isinstance(nest, Rejected):
            return nest
        if nest.inner:
            return Rejected("unsupported", "a reduction")
        elements = _elements(task, nest)
        return None if 0 < elements <= _LARGEST_INDEX else Rejected("unsupported", f"{elements} elements")

    def start(self, task: Task, target: Target) -> Config:
        """Return eight elements per thread, fewer where the device would not fill."""
        return next(self.configurations(task, target, Effort.QUICK))

    def configurations(self, task: Task, target: Target, effort: Effort) -> Iterator[Config]:
        """Yield blocks near the heuristic first."""
        nest = _nest(task.form)
        if isinstance(nest, Rejected) or not isinstance(target, CudaTarget):
            return
        elements = _elements(task, nest)
        wanted = min(1024, max(128, 1 << max(0, elements // (2 * target.sm_count)).bit_length()))
        spaces: list[Config] = [
            (("block", block), ("num_warps", warps))
            for block in _BLOCKS
            for warps in _WARPS
            if 1 <= block / (32 * warps) <= 64
        ]

        def distance(config: Config) -> float:
            values = {name: int(value) for name, value in config}
            per_thread = values["block"] / (32 * values["num_warps"])
            return abs(math.log2(values["block"] / wanted)) + abs(math.log2(per_thread / 8))

        ordered = sorted(spaces, key=distance)
        # A quick search is a list, any other a descent that sees the whole space.
        share = 1.0 if effort is Effort.QUICK else LIMITS[Effort.THOROUGH] / LIMITS[effort]
        yield from thin(with_dependent_launch(ordered, offered=target.arch >= 90), effort, share)

    def plan(self, task: Task, config: Config) -> KernelPlan | Rejected:
        """State the launch without compiling."""
        nest = _nest(task.form)
        if isinstance(nest, Rejected):
            return nest
        from tune_model.tune.triton.kernels import rows as kernels

        values = dict(config)
        block = int(values["block"])
        generated = pointwise_function(elide_rounding(nest), task.form)
        arguments = {
            "operands": generated.operands,
            "count": element_count(generated.extent, task.form),
            "BLOCK": Constant(block),
            "PDL": Constant(bool(values["pdl"])),
            "BODY": Constant(load_function(generated.source, "body")),
        }
        options = Options(int(values["num_warps"]), 1, programmatic=bool(values["pdl"]))
        launch = Launch(kernels.pointwise, arguments, (f"cdiv({generated.extent}, {block})", 1, 1), options)
        limit: tuple[Requirement, ...] = (Within(generated.extent, 0, _LARGEST_INDEX),)
        return KernelPlan((launch,), requires=(*nest.requires, *limit))

    def build(self, task: Task, config: Config, target: Target) -> Built | Rejected:
        """Generate and compile."""
        return build_kernel(self.plan(task, config), target)


def _nest(form: Form) -> LoopNest | Rejected:
    nest = lower(form)
    return nest if isinstance(nest, Rejected) or nest.inner else in_pieces(nest)


def _elements(task: Task, nest: LoopNest) -> int:
    return evaluate(product(tuple(a.extent for a in nest.axes)), slot_sizes(task.form))


FAMILY = TritonPointwise()
