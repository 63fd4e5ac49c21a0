"""Candidates that misbehave, each in one way, and the reason that should be recorded for it.

The kernels compute the right product first where they can, so that nothing but their misbehaviour keeps them from being
chosen. They are for a linear layer in float32 without bias, on a CPU: real machine code in a real process.
"""

import mmap
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Final

from tune_model.extract.task import Task
from tune_model.runtime.kernel import CpuLaunch, Kernel
from tune_model.runtime.program import FormKind
from tune_model.tune.candidate import Built, Config, Effort, Rejected
from tune_model.tune.cpp.compile import compile_library, digest
from tune_model.tune.target import CpuTarget, Target

__all__ = ["BUILD_KINDS", "KERNEL_KINDS", "KINDS", "GoodFamily", "HostileFamily", "compile_linear", "misbehave"]

BUILD_KINDS: Final = {
    "compiler raises": "compiler",
    "compiler aborts": "crash",
    "compiler hangs": "timeout",
    "compiler eats memory": "out of memory",
    "compiler exits": "crash",
    "compiler leaves processes": "processes",
}
"""What a build may do, and the reason it is rejected for."""

KERNEL_KINDS: Final = {
    "faults": "crash",
    "loops": "timeout",
    "eats memory": "out of memory",
    "writes behind its result": "stray write",
    "changes its input": "stray write",
    "wrong values": "wrong",
    "not a number": "wrong",
    "right only once": "wrong",
    "exits": "crash",
    "leaves processes": "processes",
    "leaves threads": "processes",
    "prints": "output",
}
"""What a kernel may do, and the reason it is rejected for."""

KINDS: Final = BUILD_KINDS | KERNEL_KINDS

_LINEAR: Final = """
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <pthread.h>
#include <signal.h>
#include <unistd.h>

static void *spin(void *nothing) {
  for (volatile int i = 0;; ++i) {}
  return nothing;
}

static void product(const float *x, const float *w, float *y, int64_t m, int64_t n, int64_t k) {
  for (int64_t i = 0; i < m; ++i)
    for (int64_t j = 0; j < n; ++j) {
      float sum = 0;
      for (int64_t l = 0; l < k; ++l) sum += x[i * k + l] * w[j * k + l];
      y[i * n + j] = sum;
    }
}

extern "C" __attribute__((visibility("default"))) void entry(void *const *pointers, const int64_t *sizes) {
  float *x = (float *)pointers[0], *w = (float *)pointers[1], *y = (float *)pointers[2];
  const int64_t m = sizes[0], n = sizes[1], k = sizes[2];
  (void)x; (void)w; (void)y; (void)m; (void)n; (void)k;
  BODY
}
"""

_BODIES: Final = {
    "faults": "product(x, w, y, m, n, k); *(volatile int *)16 = 1;",
    "loops": "product(x, w, y, m, n, k); for (volatile int i = 0;; ++i) {}",
    "eats memory": """
      product(x, w, y, m, n, k);
      for (;;) {
        char *piece = (char *)malloc(64 << 20);
        if (!piece) { fputs("terminate: std::bad_alloc\\n", stderr); fflush(stderr); abort(); }
        piece[0] = 1;
      }""",
    "writes behind its result": "product(x, w, y, m, n, k); y[m * n + 3] = 1;",
    "changes its input": "product(x, w, y, m, n, k); w[n * k / 2] += 1;",
    "wrong values": "product(x, w, y, m, n, k); y[m * n / 2] += 1;",
    "not a number": 'product(x, w, y, m, n, k); y[m * n / 2] = __builtin_nanf("");',
    "right only once": """
      static int calls;
      if (calls++ == 0) product(x, w, y, m, n, k);
      else y[0] += 1;""",
    "exits": "product(x, w, y, m, n, k); _exit(0);",
    "leaves processes": """
      product(x, w, y, m, n, k);
      if (fork() == 0) {
        setsid();
        signal(SIGTERM, SIG_IGN);
        if (fork() == 0) for (volatile int i = 0;; ++i) {}
        _exit(0);
      }
      usleep(100000);""",
    "leaves threads": """
      product(x, w, y, m, n, k);
      static bool begun;
      pthread_t thread;
      if (!begun) pthread_create(&thread, nullptr, spin, nullptr);
      begun = true;""",
    "prints": """
      product(x, w, y, m, n, k);
      for (int i = 0; i < 10000; ++i) puts("\\x1b[31mERROR\\x00\\xff: everything is fine, no need to look here");""",
}


class HostileFamily:
    """One configuration for each kind.

    Args:
        name: Of the family.
        kinds: Which to offer; all by default.
    """

    version = 1
    kinds: frozenset[FormKind] = frozenset({"matmul"})

    def __init__(self, name: str = "hostile", offered: tuple[str, ...] = tuple(KINDS)) -> None:
        self.name = name
        self.offered = offered

    def accepts(self, task: Task, target: Target) -> Rejected | None:
        """Accept what `compile_linear` can compute."""
        return None if isinstance(target, CpuTarget) else Rejected("unsupported", "written for a CPU")

    def start(self, task: Task, target: Target) -> Config:
        """Return the first kind."""
        return (("kind", self.offered[0]),)

    def configurations(self, task: Task, target: Target, effort: Effort) -> Iterator[Config]:
        """Yield every kind."""
        yield from ((("kind", kind),) for kind in self.offered)

    def build(self, task: Task, config: Config, target: Target) -> Built | Rejected:
        """Misbehave, or compile what will."""
        kind = str(dict(config)["kind"])
        if kind in BUILD_KINDS:
            misbehave(kind)
            return compile_linear(task, target, _BODIES["wrong values"])
        return compile_linear(task, target, _BODIES[kind])


class GoodFamily(HostileFamily):
    """The same kernel without anything beside it, in as many configurations as wanted."""

    def __init__(self, name: str = "good", count: int = 1) -> None:
        super().__init__(name, tuple(str(number) for number in range(count)))

    def build(self, task: Task, config: Config, target: Target) -> Built | Rejected:
        """Compile."""
        return compile_linear(task, target, f"/* {dict(config)['kind']} */ product(x, w, y, m, n, k);")


def compile_linear(task: Task, target: Target, body: str) -> Built | Rejected:
    """Compile a linear layer with something beside it.

    Args:
        task: With a form of `x` [m, k] and a weight [n, k].
        target: A CPU.
        body: C++, with `product(x, w, y, m, n, k)` at hand.
    """
    if not isinstance(target, CpuTarget):
        return Rejected("unsupported", "written for a CPU")
    code = compile_library(_LINEAR.replace("BODY", body), target)
    if isinstance(code, Rejected):
        return code
    name = digest(code)
    x, w = task.form.parameters
    (y,) = task.form.results
    sizes = (f"{x.name}.size0", f"{w.name}.size0", f"{w.name}.size1")
    return Built(Kernel((CpuLaunch(name, "entry", (x.name, w.name, y.name), sizes),)), {name: code})


def misbehave(kind: str) -> None:
    """Do what a kind of build does."""
    match kind:
        case "compiler raises":
            raise RuntimeError("no pattern for this operand\nand two thousand lines of dump")
        case "compiler aborts":
            os.write(2, b"Assertion `isLegal()' failed.\n")
            os.abort()
        case "compiler hangs":
            subprocess.run(["sh", "-c", "while :; do :; done"], check=False)
        case "compiler eats memory":
            hoard = []
            while True:  # asked for and not touched: it is the asking that is limited
                hoard.append(mmap.mmap(-1, 256 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))
        case "compiler exits":
            sys.exit(3)
        case "compiler leaves processes":
            subprocess.Popen(["sh", "-c", "while :; do :; done"], start_new_session=True)
            time.sleep(0.1)
