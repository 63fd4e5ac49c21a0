"""Matrix products whose K is split between programs; the parts are added in a fixed order.

A tile's last program adds them, or a second kernel does.
"""

from collections.abc import Iterator

from tune_model.extract.task import Task
from tune_model.runtime.program import FormKind
from tune_model.tune.candidate import Built, Config, Effort, Rejected
from tune_model.tune.search.order import SHORT_BYTES, thin, with_prefetch
from tune_model.tune.target import CudaTarget, Target
from tune_model.tune.triton.descriptor_plan import is_described
from tune_model.tune.triton.launch import KernelPlan, build_kernel
from tune_model.tune.triton.matmul_plan import Product, read_product, split_k_plan, transposed_weight
from tune_model.tune.triton.matmul_space import split_k_space, with_layouts

__all__ = ["FAMILY", "TritonSplitK"]

_MOST_ROWS_OVERLAPPED = 256
"""Longer products hide a launch anyway."""


class TritonSplitK:
    """See the module."""

    name = "triton_split_k"
    version = 3
    kinds: frozenset[FormKind] = frozenset({"matmul"})

    def accepts(self, task: Task, target: Target) -> Rejected | None:
        """Accept products that leave the device idle when they are not split."""
        if not isinstance(target, CudaTarget):
            return Rejected("unsupported", "a CUDA kernel")
        product = read_product(task)
        if isinstance(product, Rejected):
            return product
        if not split_k_space(product, target):
            size = f"{product.m} x {product.n} x {product.k}"
            batches = "" if product.batch is None else f"{product.batches} of "
            return Rejected("unsupported", f"{batches}{size} fills the device unsplit")
        return None

    def start(self, task: Task, target: Target) -> Config:
        """Return the first configuration."""
        return next(self.configurations(task, target, Effort.QUICK))

    def configurations(self, task: Task, target: Target, effort: Effort) -> Iterator[Config]:
        """Yield tiles near those that won on similar shapes first."""
        product = read_product(task)
        if isinstance(product, Rejected) or not isinstance(target, CudaTarget):
            return
        overlap = target.arch >= 90 and product.m <= _MOST_ROWS_OVERLAPPED
        tiles = split_k_space(product, target)
        can_turn = not isinstance(transposed_weight(task), Rejected)
        space = with_layouts(tiles, tiles if can_turn else (), every=2)
        short = product.weight_bytes <= SHORT_BYTES
        yield from thin(with_prefetch(space, offered=overlap, short=short), effort, _share(product, target))

    def plan(self, task: Task, config: Config) -> KernelPlan | Rejected:
        """State the launches without compiling."""
        product = read_product(task, str(dict(config)["layout"]))
        return product if isinstance(product, Rejected) else split_k_plan(product, config)

    def build(self, task: Task, config: Config, target: Target) -> Built | Rejected:
        """Generate the epilogue and compile."""
        return build_kernel(self.plan(task, config), target)


def _share(product: Product, target: CudaTarget) -> float:
    """Return this family's part of the search: splitting pays where rows are few; others split what they fetch."""
    if product.m == 1:
        return 0.25
    share = 0.8 if product.m <= 128 else 0.4
    return 0.75 * share if is_described(product, target) else share


FAMILY = TritonSplitK()
