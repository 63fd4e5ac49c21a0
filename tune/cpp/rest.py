"""The rest of a matmul form, after the library's product, as one generated C++ kernel."""

from tune_model.runtime.kernel import CpuLaunch
from tune_model.tune.candidate import Rejected
from tune_model.tune.cpp.emit import Printed, Shape, Unprintable, print_nest
from tune_model.tune.cpp.library import build_launch
from tune_model.tune.loops.rest import RestKernel
from tune_model.tune.target import CpuTarget

__all__ = ["build_rest"]


def build_rest(rest: RestKernel, shape: Shape, target: CpuTarget) -> tuple[CpuLaunch, dict[str, bytes]] | Rejected:
    """Compile the rest.

    Raises:
        CompilerMissingError: There is no g++ on PATH.
    """
    try:
        printed = print_nest(rest.nest, shape)
    except Unprintable as reason:
        return Rejected("unsupported", str(reason))
    pointers = tuple(rest.names.get(slot, slot) for slot in printed.pointers)
    return build_launch(Printed(printed.source, pointers, printed.sizes), target)
