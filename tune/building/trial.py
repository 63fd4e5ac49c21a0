"""Whether a compiler works at all, asked before it is believed that it refuses a kernel.

A compiler that is there but broken (no headers, an assembler that may not be run, no room for its files) refuses every
candidate. Every task would keep the plain operators then, and go on doing so after the repair, since refusals are
recorded. So when a build fails and none has succeeded lately, the smallest kernel is built; where that fails too, the
run ends with what the compiler said, before anything of it is recorded.
"""

import math
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from tune_model.extract.task import Task
from tune_model.runtime.errors import TuneModelError
from tune_model.runtime.kernel import Kernel
from tune_model.runtime.program import FormKind
from tune_model.tune.building.pool import BuildPool, Job
from tune_model.tune.building.scratch import use_compiler_cache
from tune_model.tune.candidate import Built, Config, Effort, Rejected
from tune_model.tune.cpp.compile import compile_library
from tune_model.tune.cpp.library import ENTRY, full_source
from tune_model.tune.target import CpuTarget, CudaTarget, Target

__all__ = ["CompilerBrokenError", "CompilerWatch", "require_compiler"]

_RECENT_S: Final = 10.0
"""So long after a build that succeeded, one that fails is the candidate's own fault."""

_COMPILED: Final = frozenset({"shared memory", "registers", "spills"})
"""Reasons to refuse what a compiler made."""

_DOUBTFUL: Final = frozenset({"compiler", "timeout", "crash"})

_SMALLEST: Final = f"""
extern "C" __attribute__((visibility("default"))) void {ENTRY}(void *const *pointers, const int64_t *) {{
  Floats x = load((const float *)pointers[0]);
  store((float *)pointers[1], op_exp(x));
}}
"""


class CompilerBrokenError(TuneModelError):
    """A compiler is there and refuses even the smallest kernel."""


class _Smallest:
    """Builds the smallest kernel, as a family does, so that it can be built where candidates are."""

    name = "smallest"
    version = 1
    kinds: frozenset[FormKind] = frozenset()

    def accepts(self, task: Task, target: Target) -> Rejected | None:
        """Refuse: it competes for nothing."""
        del task, target
        return Rejected("unsupported", "it computes nothing that is asked for")

    def start(self, task: Task, target: Target) -> Config:
        """Return the one configuration."""
        del task, target
        return ()

    def configurations(self, task: Task, target: Target, effort: Effort) -> Iterator[Config]:
        """Yield nothing."""
        del task, target, effort
        yield from ()

    def build(self, task: Task, config: Config, target: Target) -> Built | Rejected:
        """Compile it, without what was compiled before."""
        del task, config
        return _compile_cuda(target) if isinstance(target, CudaTarget) else _compile_cpu(target)


def _compile_cpu(target: CpuTarget) -> Built | Rejected:
    try:
        code = compile_library(full_source(_SMALLEST), target)
    except OSError as error:
        return Rejected("compiler", str(error))
    if isinstance(code, Rejected):
        return code
    if not code.startswith(b"\x7fELF"):
        return Rejected("compiler", f"it made {len(code)} bytes that are no library")
    return Built(Kernel(()), {})


def _compile_cuda(target: CudaTarget) -> Built | Rejected:
    from tune_model.tune.triton.compile import Options, Source, compile_kernel
    from tune_model.tune.triton.kernels.smallest import add_one

    source = Source(add_one, {"pointer": "*fp32", "COUNT": "constexpr"}, {(1,): 64}, {})
    with tempfile.TemporaryDirectory(prefix="tune-model-") as alone, use_compiler_cache(Path(alone)):
        made = compile_kernel(source, Options(), target)
    return made if isinstance(made, Rejected) else Built(Kernel(()), {})


def require_compiler(target: Target) -> None:
    """Make sure that the C++ compiler works that a CPU's kernels are made by; Triton is tried when a build fails.

    Raises:
        CompilerMissingError: There is no g++ on PATH.
        CompilerBrokenError: It compiles nothing.
    """
    made = _compile_cpu(target) if isinstance(target, CpuTarget) else None
    if isinstance(made, Rejected):
        raise _broken(target, made)


class CompilerWatch:
    """Tells, build by build, a compiler that refuses a kernel from one that refuses all.

    Args:
        pool: Where candidates are built.
        target: What for.
        stop: Ends a wait.
    """

    def __init__(self, pool: BuildPool, target: Target, stop: threading.Event) -> None:
        self._pool = pool
        self._target = target
        self._stop = stop
        self._worked_s = -math.inf

    def mind(self, result: Built | Rejected, task: Task) -> None:
        """Look at a build that has ended; the smallest kernel is built when there is reason to doubt the compiler.

        Raises:
            CompilerBrokenError: It compiles nothing.
        """
        now = time.monotonic()
        if result.code if isinstance(result, Built) else result.reason in _COMPILED:
            self._worked_s = now
            return
        doubtful = isinstance(result, Rejected) and result.reason in _DOUBTFUL
        if not doubtful or now - self._worked_s < _RECENT_S:
            return
        found = self._try(task)
        if isinstance(found, Rejected):
            raise _broken(self._target, found)
        self._worked_s = time.monotonic()

    def _try(self, task: Task) -> Built | Rejected | None:
        ticket = self._pool.submit(Job(_Smallest(), task, (), self._target), urgent=True)
        while not self._stop.is_set():
            found = self._pool.wait([ticket], 1.0)
            if found:
                return found[ticket]
        return None


def _broken(target: Target, found: Rejected) -> CompilerBrokenError:
    gpu = isinstance(target, CudaTarget)
    what = "Triton (with the ptxas it brings)" if gpu else "g++ on PATH"
    advice = "install it again" if gpu else "repair it (on Debian: apt-get install --reinstall g++ libc6-dev)"
    said = found.detail.strip() or "it ended with an error and said nothing"
    return CompilerBrokenError(
        f"{what} does not compile even the smallest kernel for {target.name}: {said}; expected a compiler that works: "
        f"{advice}, make room in the folder for temporary files, and run the same command again: nothing that was "
        "measured is lost"
    )
