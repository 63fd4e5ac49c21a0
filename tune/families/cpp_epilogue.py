"""The matmul as ATen runs it, and everything after it as one generated C++ kernel, in the product's memory."""

import time
from collections.abc import Iterator

from tune_model.extract.task import Task
from tune_model.runtime.kernel import Kernel
from tune_model.runtime.program import Call, FormKind
from tune_model.tune.candidate import Built, Config, Effort, Rejected
from tune_model.tune.cpp.emit import Shape
from tune_model.tune.cpp.rest import build_rest
from tune_model.tune.loops.rest import RestKernel, lower_rest, take_apart
from tune_model.tune.target import CpuTarget, Target

__all__ = ["FAMILY", "CppEpilogue"]

_GRAINS = (16384, 4096, 1 << 30)


class CppEpilogue:
    """See the module."""

    name = "cpp_epilogue"
    version = 1
    kinds: frozenset[FormKind] = frozenset({"matmul"})

    def accepts(self, task: Task, target: Target) -> Rejected | None:
        """Accept a linear layer with pointwise work after it."""
        if not isinstance(target, CpuTarget):
            return Rejected("unsupported", "a CPU kernel")
        rest = _rest(task)
        return rest if isinstance(rest, Rejected) else None

    def start(self, task: Task, target: Target) -> Config:
        """Return two vectors per step, blocks of 16384 elements."""
        return next(self.configurations(task, target, Effort.QUICK))

    def configurations(self, task: Task, target: Target, effort: Effort) -> Iterator[Config]:
        """Yield lengths of blocks."""
        grains = _GRAINS[:1] if effort is Effort.QUICK else _GRAINS
        yield from (((("grain", grain)),) for grain in grains)

    def build(self, task: Task, config: Config, target: Target) -> Built | Rejected:
        """Compile what follows the matmul."""
        parts, rest = take_apart(task.form), _rest(task)
        if isinstance(rest, Rejected):
            return rest
        if isinstance(parts, Rejected) or not isinstance(target, CpuTarget):
            return Rejected("unsupported", "a CPU kernel")
        began = time.perf_counter()
        made = build_rest(rest, Shape(2, "costly", int(dict(config)["grain"])), target)
        if isinstance(made, Rejected):
            return made
        launch, code = made
        product = Call(parts.call.op, parts.call.args, parts.call.kwargs, (rest.product,))
        kernel = Kernel((*parts.before, product, launch), requires=rest.requires)
        return Built(kernel, code, build_s=time.perf_counter() - began)


def _rest(task: Task) -> RestKernel | Rejected:
    parts = take_apart(task.form)
    return parts if isinstance(parts, Rejected) else lower_rest(task.form, parts)


FAMILY = CppEpilogue()
