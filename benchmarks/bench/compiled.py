"""`torch.compile` at its best as a contender: its own search first, then captured in the same kind of graph as ours."""

import time
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

import torch

from bench.arena import Contender, Run, Setting

__all__ = ["Compiled", "compile_function", "eager"]

MODE: Final = "max-autotune-no-cudagraphs"
"""The graph is ours: the same kind for every contender."""


class Compiled(NamedTuple):
    """A compiled function.

    Attributes:
        contender: Its name is `max_autotune`.
        compile_s: What tracing, searching and compiling took.
    """

    contender: Contender
    compile_s: float


def compile_function(function: Callable[..., Any], inputs: Sequence[torch.Tensor]) -> Compiled:
    """Compile for the sizes of the inputs, with max-autotune and coordinate descent; the function's is forgotten."""
    import torch._inductor.config as inductor

    torch._dynamo.reset()
    started = time.monotonic()
    compiled = torch.compile(function, mode=MODE, dynamic=False)
    with torch.no_grad(), inductor.patch(coordinate_descent_tuning=True, autotune_num_choices_displayed=0):
        for _ in range(3):
            compiled(*inputs)
        if inputs[0].device.type == "cuda":
            torch.cuda.synchronize(inputs[0].device)
    compile_s = time.monotonic() - started
    return Compiled(Contender("max_autotune", _binding(compiled)), compile_s)


def eager(function: Callable[..., Any]) -> Contender:
    """Return plain PyTorch, one kernel for each operator, as a contender."""
    return Contender("eager", _binding(function))


def _binding(function: Callable[..., Any]) -> Callable[[Setting], Run]:
    def bind(setting: Setting) -> Run:
        sets = setting.sets

        def run(number: int) -> Sequence[torch.Tensor]:
            results = function(*sets[number])
            return results if isinstance(results, tuple) else (results,)

        return run

    return bind
