"""Matrix times up to four vectors without tensor cores: the weights stream through once."""

from collections.abc import Iterator

from tune_model.extract.task import Task
from tune_model.runtime.program import FormKind
from tune_model.tune.candidate import Built, Config, Effort, Rejected
from tune_model.tune.relayout import TRANSPOSED
from tune_model.tune.search.order import SHORT_BYTES, thin, with_prefetch
from tune_model.tune.target import CudaTarget, Target
from tune_model.tune.triton.launch import KernelPlan, build_kernel
from tune_model.tune.triton.matmul_plan import gemv_plan, read_product
from tune_model.tune.triton.matmul_space import gemv_space, with_layouts

__all__ = ["FAMILY", "TritonGemv"]

_MOST_ROWS = 4


class TritonGemv:
    """See the module."""

    name = "triton_gemv"
    version = 2
    kinds: frozenset[FormKind] = frozenset({"matmul"})

    def accepts(self, task: Task, target: Target) -> Rejected | None:
        """Accept products of at most four rows."""
        if not isinstance(target, CudaTarget):
            return Rejected("unsupported", "a CUDA kernel")
        product = read_product(task)
        if isinstance(product, Rejected):
            return product
        if product.m > _MOST_ROWS:
            return Rejected("unsupported", f"{product.m} rows; expected at most {_MOST_ROWS}")
        return None

    def start(self, task: Task, target: Target) -> Config:
        """Return the first configuration."""
        return next(self.configurations(task, target, Effort.QUICK))

    def configurations(self, task: Task, target: Target, effort: Effort) -> Iterator[Config]:
        """Yield tiles near those that won on similar shapes first."""
        product = read_product(task)
        if isinstance(product, Rejected) or not isinstance(target, CudaTarget):
            return
        overlap = target.arch >= 90
        turned = read_product(task, TRANSPOSED)
        transposed = [] if isinstance(turned, Rejected) else gemv_space(turned, target)
        # Rows of a plain weight are what a program streams; the transpose is for weights that prefill wants so.
        space = with_layouts(gemv_space(product, target), transposed, every=5)
        short = product.weight_bytes <= SHORT_BYTES
        yield from thin(with_prefetch(space, offered=overlap, short=short), effort, 1.0 if product.m <= 2 else 0.5)

    def plan(self, task: Task, config: Config) -> KernelPlan | Rejected:
        """State the launches without compiling."""
        product = read_product(task, str(dict(config)["layout"]))
        return product if isinstance(product, Rejected) else gemv_plan(product, config)

    def build(self, task: Task, config: Config, target: Target) -> Built | Rejected:
        """Generate the epilogue and compile."""
        return build_kernel(self.plan(task, config), target)


FAMILY = TritonGemv()
