"""Matrix products in tiles on tensor cores: any number of rows, operands swapped where rows are few."""

from collections.abc import Iterator

from tune_model.extract.task import Task
from tune_model.runtime.program import FormKind
from tune_model.tune.candidate import Built, Config, Effort, Rejected
from tune_model.tune.search.order import SHORT_BYTES, interleave, thin, with_prefetch
from tune_model.tune.target import CudaTarget, Target
from tune_model.tune.triton.descriptor_plan import is_described
from tune_model.tune.triton.launch import KernelPlan, build_kernel
from tune_model.tune.triton.matmul_plan import Product, matmul_plan, read_product, transposed_weight
from tune_model.tune.triton.matmul_space import INVARIANT_ROWS, matmul_space, with_layouts

__all__ = ["FAMILY", "TritonMatmul"]

_MOST_ROWS_OVERLAPPED = 256
"""Longer products hide a launch anyway."""


class TritonMatmul:
    """See the module."""

    name = "triton_matmul"
    version = 2
    kinds: frozenset[FormKind] = frozenset({"matmul"})

    def accepts(self, task: Task, target: Target) -> Rejected | None:
        """Accept any product the kernel can read."""
        if not isinstance(target, CudaTarget):
            return Rejected("unsupported", "a CUDA kernel")
        product = read_product(task)
        if isinstance(product, Rejected):
            return product
        return None

    def start(self, task: Task, target: Target) -> Config:
        """Return the first configuration."""
        return next(self.configurations(task, target, Effort.QUICK))

    def configurations(self, task: Task, target: Target, effort: Effort) -> Iterator[Config]:
        """Yield tiles near those that won on similar shapes first."""
        product = read_product(task)
        if isinstance(product, Rejected) or not isinstance(target, CudaTarget):
            return
        if product.invariant:
            few, many = (matmul_space(product._replace(m=rows), target) for rows in INVARIANT_ROWS)
            both = dict.fromkeys(interleave(few, many, 1))
            yield from thin(with_prefetch(with_layouts(both, (), every=1), offered=False), effort)
            return
        overlap = target.arch >= 90 and product.m <= _MOST_ROWS_OVERLAPPED
        tiles = matmul_space(product, target)
        can_turn = not isinstance(transposed_weight(task), Rejected)
        space = with_layouts(tiles, tiles if can_turn else (), every=2)
        short = product.weight_bytes <= SHORT_BYTES
        yield from thin(with_prefetch(space, offered=overlap, short=short), effort, _share(product, target))

    def plan(self, task: Task, config: Config) -> KernelPlan | Rejected:
        """State the launches without compiling."""
        product = read_product(task, str(dict(config)["layout"]))
        return product if isinstance(product, Rejected) else matmul_plan(product, config)

    def build(self, task: Task, config: Config, target: Target) -> Built | Rejected:
        """Generate the epilogue and compile."""
        return build_kernel(self.plan(task, config), target)


def _share(product: Product, target: CudaTarget) -> float:
    """Return this family's part: with one row `triton_gemv` is likelier to win, with many what fetches tiles."""
    if product.m <= 128:
        return 0.25 if product.m == 1 else 1.0
    return 0.4 if product.m > _MOST_ROWS_OVERLAPPED and is_described(product, target) else 0.6


FAMILY = TritonMatmul()
