"""From C++ source to the bytes of a shared library, with g++ found on PATH.

The same source, flags and compiler give the same bytes: no paths, times or build ids are in them. Nothing but libm and
libc is linked, so a library loads wherever torch does.
"""

import hashlib
import re
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from functools import lru_cache
from importlib.resources import files
from pathlib import Path

from tune_model.runtime.errors import TuneModelError
from tune_model.tune.candidate import Rejected
from tune_model.tune.target import CpuTarget

__all__ = ["CompilerMissingError", "compile_library", "compiler_flags", "compiler_version", "digest", "header"]

TIMEOUT_S = 120

# Floating point as written: no contraction (fused multiply-add is asked for by name), no reassociation, NaN and
# infinity kept; but no errno and no traps, which would forbid vector code.
_FLAGS = (
    "-std=c++17",
    "-O2",
    "-shared",
    "-fPIC",
    "-fvisibility=hidden",
    "-ffp-contract=off",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-fwrapv",
    "-fno-exceptions",
    "-fno-rtti",
    "-fno-asynchronous-unwind-tables",
    "-fno-ident",
    "-fno-plt",
    "-g0",
    "-w",
    "-nostdlib",
    "-Wl,--build-id=none",
    "-Wl,-s",
    "-Wl,-z,noexecstack",
    "-frandom-seed=0",
)
_LIBRARIES = ("-lm", "-lc", "-lgcc")

_X86_FLAGS = {
    "avx": "-mavx",
    "avx2": "-mavx2",
    "fma": "-mfma",
    "f16c": "-mf16c",
    "bmi1": "-mbmi",
    "bmi2": "-mbmi2",
    "avx512f": "-mavx512f",
    "avx512bw": "-mavx512bw",
    "avx512dq": "-mavx512dq",
    "avx512vl": "-mavx512vl",
    "avx512_bf16": "-mavx512bf16",
}


class CompilerMissingError(TuneModelError):
    """Tuning for a CPU needs g++, and there is none on PATH."""


@lru_cache(maxsize=8)
def header(name: str) -> str:
    """Return the text of a header that lies in this folder."""
    return files("tune_model.tune.cpp").joinpath(name).read_text(encoding="utf-8")


def _compiler() -> str:
    found = shutil.which("g++")
    if found is None:
        raise CompilerMissingError(
            "no g++ on PATH; tuning for a CPU compiles C++ kernels. Install it (on Debian: apt-get install g++); "
            "a finished artifact needs no compiler."
        )
    return found


def compiler_version() -> str:
    """Return `g++ 12.2`.

    Raises:
        CompilerMissingError: There is none.
    """
    run = subprocess.run(
        [_compiler(), "-dumpfullversion"], capture_output=True, text=True, check=False, timeout=TIMEOUT_S
    )
    match = re.match(r"(\d+\.\d+)", run.stdout)
    return f"g++ {match[1] if match else 'unknown'}"


def compiler_flags(target: CpuTarget) -> tuple[str, ...]:
    """Return the flags for a machine: its instruction set and nothing that depends on where it is compiled."""
    if target.machine != "x86_64":
        return _FLAGS
    return (*_FLAGS, *(flag for name, flag in _X86_FLAGS.items() if name in target.isa))


def digest(code: bytes) -> str:
    """Return the name a library goes by."""
    return hashlib.sha256(code).hexdigest()


def compile_library(source: str, target: CpuTarget, extra: Sequence[str] = ()) -> bytes | Rejected:
    """Compile one source file.

    Returns:
        The library, or `Rejected("compiler", ...)` with what the compiler printed.

    Raises:
        CompilerMissingError: There is no g++ on PATH.
    """
    compiler = _compiler()
    with tempfile.TemporaryDirectory(prefix="tune-model-") as folder:
        (Path(folder) / "kernel.cpp").write_text(source, encoding="utf-8")
        command = [compiler, *compiler_flags(target), *extra, "kernel.cpp", "-o", "kernel.so", *_LIBRARIES]
        try:
            run = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False, timeout=TIMEOUT_S)
        except subprocess.TimeoutExpired:
            return Rejected("timeout", f"g++ took longer than {TIMEOUT_S} s")
        if run.returncode:
            return Rejected("compiler", _shorten(run.stderr))
        return (Path(folder) / "kernel.so").read_bytes()


def _shorten(text: str) -> str:
    lines = [line for line in text.splitlines() if "error" in line] or text.splitlines()
    return "\n".join(lines[:8])[:2000]
