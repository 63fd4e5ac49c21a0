"""From a printed nest to a launch: source with its headers, compiled, named by content."""

from collections.abc import Sequence

from tune_model.runtime.kernel import CpuLaunch
from tune_model.tune.candidate import Rejected
from tune_model.tune.cpp.compile import compile_library, digest, header
from tune_model.tune.cpp.emit import Printed
from tune_model.tune.target import CpuTarget

__all__ = ["ENTRY", "build_gemv", "build_launch", "full_source"]

ENTRY = "entry"


_HEADERS = ("vector.h", "parallel.h")


def full_source(body: str, headers: Sequence[str] = _HEADERS) -> str:
    """Return a whole translation unit: the headers, then the kernel."""
    return "\n".join((*(header(name) for name in headers), body))


def build_launch(
    printed: Printed, target: CpuTarget, headers: Sequence[str] = _HEADERS
) -> tuple[CpuLaunch, dict[str, bytes]] | Rejected:
    """Compile a kernel whose entry is `ENTRY`.

    Returns:
        The launch, and its code by the hash that the launch names; or why the compiler refused.

    Raises:
        CompilerMissingError: There is no g++ on PATH.
    """
    code = compile_library(full_source(printed.source, headers), target)
    if isinstance(code, Rejected):
        return code
    name = digest(code)
    return CpuLaunch(name, ENTRY, printed.pointers, printed.sizes), {name: code}


def build_gemv(printed: Printed, target: CpuTarget) -> tuple[CpuLaunch, dict[str, bytes]] | Rejected:
    """Compile a kernel that uses the dot products of `gemv.h`; as `build_launch`."""
    return build_launch(printed, target, (*_HEADERS, "gemv.h"))
