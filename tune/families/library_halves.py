"""A merged gate and up projection run as two library matmuls over the halves of its weight, and the rest generated.

Merging the two weights is decided before anything is measured; this is the other way to run them, so that the merge
has to win on the stopwatch too. The halves are views: the weight stays one.
"""

import time
from collections.abc import Iterator

import msgspec

from tune_model.extract.task import Task
from tune_model.runtime.kernel import Aligned, Kernel, Within
from tune_model.runtime.program import Call, FormKind, Ref
from tune_model.tune.candidate import Built, Config, Effort, Rejected
from tune_model.tune.cpp.emit import Shape
from tune_model.tune.cpp.rest import build_rest
from tune_model.tune.families.triton_epilogue import REST_SHAPES, rest_launch
from tune_model.tune.loops.rest import MatmulParts, RestKernel, lower_halves, take_apart
from tune_model.tune.relayout import TRANSPOSED, Layouts
from tune_model.tune.search.order import thin
from tune_model.tune.target import CpuTarget, CudaTarget, Target
from tune_model.tune.triton.launch import KernelPlan, build_kernel
from tune_model.tune.triton.matmul_plan import transposed_weight
from tune_model.tune.triton.matmul_space import with_layouts

__all__ = ["FAMILY", "LibraryHalves"]

_SHAPES = REST_SHAPES[:3]
"""Of what follows."""

_GRAIN = 16384
"""Elements per block of it on a CPU."""

_LARGEST_INDEX = 2**31 - 8192

_Split = tuple[MatmulParts, RestKernel, tuple[str, str]]


class LibraryHalves:
    """See the module."""

    name = "library_halves"
    version = 1
    kinds: frozenset[FormKind] = frozenset({"matmul"})

    def accepts(self, task: Task, target: Target) -> Rejected | None:
        """Accept a linear layer whose halves meet in one result."""
        found = _split(task)
        return found if isinstance(found, Rejected) else None

    def start(self, task: Task, target: Target) -> Config:
        """Return the usual blocks for what follows."""
        return next(self.configurations(task, target, Effort.QUICK))

    def configurations(self, task: Task, target: Target, effort: Effort) -> Iterator[Config]:
        """Yield shapes of blocks; on a GPU for the weight as it is and for its transpose, on a CPU one."""
        if not isinstance(target, CudaTarget):
            yield (("grain", _GRAIN),)
            return
        spaces: list[Config] = [(("block", block), ("num_warps", warps)) for block, warps in _SHAPES]
        transposed = () if isinstance(transposed_weight(task), Rejected) else spaces[:1]
        yield from thin(with_layouts(spaces, transposed, every=1), effort, share=0.25)

    def plan(self, task: Task, config: Config) -> KernelPlan | Rejected:
        """State the steps without compiling."""
        found = _split(task)
        return found if isinstance(found, Rejected) else _plan(*found, config)

    def build(self, task: Task, config: Config, target: Target) -> Built | Rejected:
        """State both matmuls and compile what follows them."""
        found = _split(task)
        if isinstance(found, Rejected):
            return found
        if not isinstance(target, CudaTarget):
            return _build_cpp(*found, config, target)
        built = build_kernel(_plan(*found, config), target)
        if isinstance(built, Rejected):
            return built
        # The library's products are aligned by its allocator, so nothing is asked of callers.
        products = found[2]
        demands = tuple(r for r in built.kernel.requires if not (isinstance(r, Aligned) and r.slot in products))
        return msgspec.structs.replace(built, kernel=msgspec.structs.replace(built.kernel, requires=demands))


def _plan(parts: MatmulParts, rest: RestKernel, products: tuple[str, str], config: Config) -> KernelPlan:
    values = dict(config)
    launch = rest_launch(rest, {}, int(values["block"]), int(values["num_warps"]))
    layouts: Layouts = ((parts.weight, TRANSPOSED),) if values["layout"] == TRANSPOSED else ()
    limit = Within(launch.grid[0], 0, _LARGEST_INDEX)
    return KernelPlan((*_products(parts, products), launch), layouts=layouts, requires=(*rest.requires, limit))


def _build_cpp(
    parts: MatmulParts, rest: RestKernel, products: tuple[str, str], config: Config, target: CpuTarget
) -> Built | Rejected:
    began = time.perf_counter()
    made = build_rest(rest, Shape(2, "costly", int(dict(config)["grain"])), target)
    if isinstance(made, Rejected):
        return made
    launch, code = made
    kernel = Kernel((*_products(parts, products), launch), requires=rest.requires)
    return Built(kernel, code, build_s=time.perf_counter() - began)


def _products(parts: MatmulParts, products: tuple[str, str]) -> Iterator[Call]:
    """Yield a library call for each half of the weight's rows."""
    half = parts.n // 2
    for side, product in enumerate(products):
        rows = f"{parts.weight}h{side}"
        yield Call("aten.slice.Tensor", (Ref(parts.weight), 0, side * half, (side + 1) * half), (), (rows,))
        yield Call("aten.linear.default", (Ref(parts.a), Ref(rows)), (), (product,))


def _split(task: Task) -> _Split | Rejected:
    parts = take_apart(task.form)
    if isinstance(parts, Rejected):
        return parts
    found = lower_halves(task.form, parts)
    return found if isinstance(found, Rejected) else (parts, *found)


FAMILY = LibraryHalves()
