"""Generated C++ for linear layers of one to four rows: the weight is streamed once, the epilogue runs on the sums."""

import itertools
import time
from collections.abc import Iterator

from tune_model.extract.task import Task
from tune_model.runtime.kernel import Kernel, Within
from tune_model.runtime.program import FormKind
from tune_model.tune.candidate import Built, Config, Effort, Rejected
from tune_model.tune.cpp.emit import Printed, Unprintable
from tune_model.tune.cpp.gemv import MOST_ROWS, GemvShape, print_gemv
from tune_model.tune.cpp.library import build_gemv
from tune_model.tune.loops.epilogue import Epilogue, lower_epilogue
from tune_model.tune.search.order import thin
from tune_model.tune.target import CpuTarget, Target

__all__ = ["FAMILY", "CppGemv"]

_START = GemvShape()


class CppGemv:
    """See the module."""

    name = "cpp_gemv"
    version = 1
    kinds: frozenset[FormKind] = frozenset({"matmul"})

    def accepts(self, task: Task, target: Target) -> Rejected | None:
        """Accept few rows of a weight stored [n, k], in float32 or half precision."""
        if not isinstance(target, CpuTarget):
            return Rejected("unsupported", "a CPU kernel")
        parts = _parts(task)
        if isinstance(parts, Rejected):
            return parts
        printed = _print(parts, _START)
        return printed if isinstance(printed, Rejected) else None

    def start(self, task: Task, target: Target) -> Config:
        """Return four rows of the weight side by side, 32 columns per work item."""
        return next(self.configurations(task, target, Effort.QUICK))

    def configurations(self, task: Task, target: Target, effort: Effort) -> Iterator[Config]:
        """Yield what is near the start first."""
        parts = _parts(task)
        if isinstance(parts, Rejected):
            return
        space = [
            (("rows", rows), ("unroll", unroll), ("block", block))
            for rows, unroll, block in itertools.product((1, 2, 4, 8), (1, 2, 4), (16, 32, 64))
            if rows * unroll * min(parts.m.size, MOST_ROWS) <= 16
        ]
        rows = _START.rows if parts.m.size <= 2 else 2
        start = (rows, _START.unroll, _START.block)
        ordered = sorted(space, key=lambda c: _steps(c, start))
        if effort is Effort.QUICK:  # how many rows are read side by side matters most
            ordered = [c for c in ordered if [int(v) for _, v in c[1:]] == [*start[1:]]][:3]
        yield from thin(ordered, effort)

    def build(self, task: Task, config: Config, target: Target) -> Built | Rejected:
        """Print and compile."""
        parts = _parts(task)
        if isinstance(parts, Rejected) or not isinstance(target, CpuTarget):
            return parts if isinstance(parts, Rejected) else Rejected("unsupported", "a CPU kernel")
        values = dict(config)
        printed = _print(parts, GemvShape(int(values["rows"]), int(values["unroll"]), int(values["block"])))
        if isinstance(printed, Rejected):
            return printed
        began = time.perf_counter()
        made = build_gemv(printed, target)
        if isinstance(made, Rejected):
            return made
        few = Within(parts.m.extent, 1, MOST_ROWS)
        kernel = Kernel((made[0],), requires=(*parts.nest.requires, few))
        return Built(kernel, made[1], build_s=time.perf_counter() - began)


def _parts(task: Task) -> Epilogue | Rejected:
    if task.form.kind != "matmul":
        return Rejected("unsupported", f"a {task.form.kind}; expected a matmul")
    parts = lower_epilogue(task.form)
    if isinstance(parts, Rejected):
        return parts
    if parts.batch is not None:
        return Rejected("unsupported", "a batched matmul")
    if not 1 <= parts.m.size <= MOST_ROWS:
        return Rejected("unsupported", f"{parts.m.size} rows; expected 1 to {MOST_ROWS}")
    if parts.dtype not in {"float32", "bfloat16", "float16"}:
        return Rejected("unsupported", f"a matmul of {parts.dtype}")
    if parts.b.strides[0] != 1 or parts.a.strides[1] != 1:
        return Rejected("unsupported", "operands that are not contiguous along k")
    if parts.k == 0 or parts.k > 65536:
        return Rejected("unsupported", f"dot products of length {parts.k}")
    return parts


def _print(parts: Epilogue, shape: GemvShape) -> Printed | Rejected:
    try:
        return print_gemv(parts, shape)
    except Unprintable as reason:
        return Rejected("unsupported", str(reason))


def _steps(config: Config, start: tuple[int, int, int]) -> int:
    """Count the notches between a configuration and the start."""
    values = [int(v) for _, v in config]
    return sum(abs(v.bit_length() - s.bit_length()) for v, s in zip(values, start, strict=True))


FAMILY = CppGemv()
