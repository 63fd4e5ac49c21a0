"""The matmul as the library runs it, and everything after it as one generated Triton kernel.

For large products the library is hard to beat, but ATen reads and writes the product again for every operator that
follows; this keeps the library's matmul and makes one pass of the rest. A residual that `addmm` can take goes into the
library call itself.
"""

from collections.abc import Iterator, Mapping

import msgspec

from tune_model.extract.task import Task
from tune_model.runtime.kernel import Aligned, Kernel, KernelStep, Within
from tune_model.runtime.program import Call, FormKind, Ref
from tune_model.tune.candidate import Built, Config, Effort, Rejected
from tune_model.tune.loops.rest import MatmulParts, RestKernel, lower_rest, take_apart
from tune_model.tune.relayout import TRANSPOSED, Layouts
from tune_model.tune.search.order import thin
from tune_model.tune.target import CudaTarget, Target
from tune_model.tune.triton.compile import Options
from tune_model.tune.triton.launch import Argument, Constant, KernelPlan, Launch, Slot, build_kernel
from tune_model.tune.triton.matmul_plan import transposed_weight
from tune_model.tune.triton.matmul_space import with_layouts
from tune_model.tune.triton.module import load_function
from tune_model.tune.triton.row_source import element_count, pointwise_function

__all__ = ["FAMILY", "REST_SHAPES", "TritonEpilogue", "rest_launch"]

REST_SHAPES = ((1024, 4), (512, 4), (2048, 8), (512, 2), (1024, 2), (1024, 8), (2048, 4), (256, 2), (4096, 8), (256, 4))
"""(block, num_warps): eight elements per thread first, a 16-byte access for half precision."""

_TRANSPOSED_AT_MOST = 4

_LARGEST_INDEX = 2**31 - 8192


class TritonEpilogue:
    """See the module."""

    name = "triton_epilogue"
    version = 2
    kinds: frozenset[FormKind] = frozenset({"matmul"})

    def accepts(self, task: Task, target: Target) -> Rejected | None:
        """Accept a linear layer with pointwise work after it."""
        if not isinstance(target, CudaTarget):
            return Rejected("unsupported", "a CUDA kernel")
        if task.form.kind != "matmul":
            return Rejected("unsupported", f"a {task.form.kind}, not a matmul")
        found = _split(task)
        return found if isinstance(found, Rejected) else None

    def start(self, task: Task, target: Target) -> Config:
        """Return the first shape."""
        return next(self.configurations(task, target, Effort.QUICK))

    def configurations(self, task: Task, target: Target, effort: Effort) -> Iterator[Config]:
        """Yield shapes of blocks; first the library call alone where it can do everything."""
        found = _split(task)
        if isinstance(found, Rejected):
            return
        spaces: list[Config] = [(("block", block), ("num_warps", warps)) for block, warps in REST_SHAPES]
        if _residual(found[0], task) is not None:
            spaces.insert(1, (("block", 0), ("num_warps", 0)))
        # The best block does not depend on the weight's layout.
        transposed = () if isinstance(transposed_weight(task), Rejected) else spaces[:_TRANSPOSED_AT_MOST]
        yield from thin(with_layouts(spaces, transposed, every=2), effort, share=0.3)

    def build(self, task: Task, config: Config, target: Target) -> Built | Rejected:
        """Compile what follows the matmul; `block=0` is the library's addmm."""
        found = _split(task)
        if isinstance(found, Rejected) or not isinstance(target, CudaTarget):
            return found if isinstance(found, Rejected) else Rejected("unsupported", "a CUDA kernel")
        parts, rest = found
        values = dict(config)
        layouts: Layouts = ((parts.weight, TRANSPOSED),) if values["layout"] == TRANSPOSED else ()
        if values["block"] == 0:
            return _addmm(parts, task, layouts)
        launch = rest_launch(rest, rest.names, int(values["block"]), int(values["num_warps"]))
        product = Call(parts.call.op, parts.call.args, parts.call.kwargs, (rest.product,))
        limit = Within(launch.grid[0], 0, _LARGEST_INDEX)
        steps: tuple[Launch | KernelStep, ...] = (*parts.before, product, launch)
        built = build_kernel(KernelPlan(steps, layouts=layouts, requires=(*rest.requires, limit)), target)
        if isinstance(built, Rejected):
            return built
        # The library's product is aligned by its allocator, so nothing is asked of callers.
        demands = tuple(r for r in built.kernel.requires if not (isinstance(r, Aligned) and r.slot == parts.product))
        return msgspec.structs.replace(built, kernel=msgspec.structs.replace(built.kernel, requires=demands))


def _split(task: Task) -> tuple[MatmulParts, RestKernel] | Rejected:
    parts = take_apart(task.form)
    if isinstance(parts, Rejected):
        return parts
    rest = lower_rest(task.form, parts)
    return rest if isinstance(rest, Rejected) else (parts, rest)


def rest_launch(rest: RestKernel, names: Mapping[str, str], block: int, num_warps: int) -> Launch:
    """Return the launch of what follows a matmul.

    Args:
        rest: As a nest.
        names: What the launch calls those of the nest's slots that are renamed.
        block: Elements per program.
        num_warps: Per program.
    """
    from tune_model.tune.triton.kernels import rows as kernels

    generated = pointwise_function(rest.nest, rest.form)
    arguments: dict[str, Argument] = {
        "operands": tuple(
            Slot(names.get(a.name, a.name), a.dtype, a.aligned) if isinstance(a, Slot) else a
            for a in generated.operands
        ),
        "count": element_count(generated.extent, rest.form),
        "BLOCK": Constant(block),
        "PDL": Constant(False),
        "BODY": Constant(load_function(generated.source, "body")),
    }
    grid = (f"cdiv({generated.extent}, {block})", 1, 1)
    return Launch(kernels.pointwise, arguments, grid, Options(num_warps, 1))


def _residual(parts: MatmulParts, task: Task) -> str | None:
    """Return the slot that one `addmm` can add: the rest is a plain sum of the product and a matrix of its shape."""
    if parts.bias is not None or parts.op != "aten.linear" or len(parts.rest) != 1 or parts.before:
        return None
    call = parts.rest[0]
    if call.op != "aten.add.Tensor" or call.kwargs or len(call.args) != 2:
        return None
    others = [arg.name for arg in call.args if isinstance(arg, Ref) and arg.name != parts.product]
    types = {p.name: p.type for p in task.form.parameters}
    return others[0] if len(others) == 1 and types.get(others[0]) == parts.type else None


def _addmm(parts: MatmulParts, task: Task, layouts: Layouts) -> Built | Rejected:
    residual = _residual(parts, task)
    if residual is None:
        return Rejected("unsupported", "no residual that addmm could add")
    transposed = f"{parts.weight}_t"
    result = task.form.results[0].name
    steps = (
        Call("aten.t.default", (Ref(parts.weight),), (), (transposed,)),
        Call("aten.addmm.default", (Ref(residual), Ref(parts.a), Ref(transposed)), (), (result,)),
    )
    return Built(Kernel(steps, layouts=layouts), {})


FAMILY = TritonEpilogue()
