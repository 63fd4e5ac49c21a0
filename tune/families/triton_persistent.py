"""Matrix products whose tiles Hopper's copy engine fetches; a fixed number of programs walks them, or each has one."""

from collections.abc import Iterator

from tune_model.extract.task import Task
from tune_model.runtime.program import FormKind
from tune_model.tune.candidate import Built, Config, Effort, Rejected
from tune_model.tune.relayout import TRANSPOSED
from tune_model.tune.search.order import interleave, thin, with_prefetch
from tune_model.tune.target import CudaTarget, Target
from tune_model.tune.triton.descriptor_plan import FIRST_ARCH, descriptor_plan, refusal
from tune_model.tune.triton.descriptor_space import descriptor_space
from tune_model.tune.triton.launch import KernelPlan, build_kernel
from tune_model.tune.triton.matmul_plan import Product, read_product
from tune_model.tune.triton.matmul_space import INVARIANT_ROWS, with_layouts

__all__ = ["FAMILY", "TritonPersistent"]

_FEWEST_ROWS = 5
_FEW_ROWS = 128
"""Up to so many rows other families are likelier to win."""

_MOST_ROWS_OVERLAPPED = 256
"""Longer products hide a launch anyway."""


class TritonPersistent:
    """See the module."""

    name = "triton_persistent"
    version = 2
    kinds: frozenset[FormKind] = frozenset({"matmul"})

    def accepts(self, task: Task, target: Target) -> Rejected | None:
        """Accept products whose operands can be described, in one layout of the weight or the other."""
        if not isinstance(target, CudaTarget):
            return Rejected("unsupported", "a CUDA kernel")
        if target.arch < FIRST_ARCH:
            return Rejected("unsupported", f"sm_{target.arch} has no tensor descriptors; from sm_{FIRST_ARCH} on")
        plain = _described(task, "plain")
        if not isinstance(plain, Rejected) and plain.m < _FEWEST_ROWS and not plain.invariant:
            return Rejected("unsupported", f"{plain.m} rows; expected at least {_FEWEST_ROWS}")
        if isinstance(plain, Rejected) and isinstance(_described(task, TRANSPOSED), Rejected):
            return plain
        if not any(True for _ in self.configurations(task, target, Effort.QUICK)):
            return Rejected("unsupported", "no tile fits")
        return None

    def start(self, task: Task, target: Target) -> Config:
        """Return the first configuration."""
        return next(self.configurations(task, target, Effort.QUICK))

    def configurations(self, task: Task, target: Target, effort: Effort) -> Iterator[Config]:
        """Yield tiles near those that are known to fill the device first."""
        if not isinstance(target, CudaTarget):
            return
        plain = _described(task, "plain")
        if task.rules.batch_invariant:
            yield from () if isinstance(plain, Rejected) else thin(_invariant(plain, target), effort)
            return
        products = [_described(task, layout) for layout in ("plain", TRANSPOSED)]
        m = max((p.m for p in products if not isinstance(p, Rejected)), default=0)
        spaces = [() if isinstance(p, Rejected) else descriptor_space(p, target) for p in products]
        configurations = with_prefetch(
            with_layouts(*spaces, every=2), offered=target.arch >= FIRST_ARCH and m <= _MOST_ROWS_OVERLAPPED
        )
        yield from thin(configurations, effort, 0.4 if m <= _FEW_ROWS else 0.6)

    def plan(self, task: Task, config: Config) -> KernelPlan | Rejected:
        """State the launches without compiling."""
        product = _described(task, str(dict(config)["layout"]))
        return product if isinstance(product, Rejected) else descriptor_plan(product, config)

    def build(self, task: Task, config: Config, target: Target) -> Built | Rejected:
        """Generate the epilogue and compile."""
        return build_kernel(self.plan(task, config), target)


def _invariant(product: Product, target: CudaTarget) -> Iterator[Config]:
    """Yield the same configurations whatever the number of rows, none of which splits k."""
    few, many = (descriptor_space(product._replace(m=rows), target) for rows in INVARIANT_ROWS)
    whole = (config for config in dict.fromkeys(interleave(few, many, 1)) if dict(config)["split_k"] == 1)
    yield from with_prefetch(with_layouts(whole, (), every=1), offered=False)


def _described(task: Task, layout: str) -> Product | Rejected:
    product = read_product(task, layout)
    return product if isinstance(product, Rejected) else refusal(product) or product


FAMILY = TritonPersistent()
