"""From the text of a target, as a configuration gives it, to the machine it means."""

import re
from typing import Final

from tune_model.tune.target import Target, TargetError

__all__ = ["TargetError", "planned_target", "probe_target"]

_PLANNED_ARCH: Final = 90
"""What `cuda` means to a plan made without a GPU: the architecture that the shipped configurations are measured on."""


def probe_target(spec: str) -> Target:
    """Return the machine to tune for.

    Args:
        spec: `auto` (a GPU if there is one, else the CPU), `cpu`, `cuda` (this machine's GPU), or `cuda:sm_90`: this
            machine's GPU if it is of that architecture, else a typical one, for planning and compiling only.

    Raises:
        TargetError: No such target, or no GPU for `cuda`.
    """
    from tune_model.tune.machine.cuda import has_gpu, offline_cuda, probe_cuda

    if spec == "auto":
        spec = "cuda" if has_gpu() else "cpu"
    if spec == "cpu":
        from tune_model.tune.machine.cpu import probe_cpu

        return probe_cpu()
    if spec == "cuda":
        return probe_cuda(0)
    match = re.fullmatch(r"cuda:sm_(\d{2,3})", spec)
    if match is None:
        raise TargetError(f"target is {spec!r}; expected auto, cpu, cuda or cuda:sm_NN")
    arch = int(match[1])
    if has_gpu() and (found := probe_cuda(0)).arch == arch:
        return found
    return offline_cuda(arch)


def planned_target(spec: str) -> tuple[Target, str | None]:
    """Return the machine to plan for; where `cuda` has no GPU, a typical one, and a sentence that says so.

    Raises:
        TargetError: No such target.
    """
    from tune_model.tune.machine.cuda import has_gpu, offline_cuda

    if spec == "cuda" and not has_gpu():
        target = offline_cuda(_PLANNED_ARCH)
        return target, f"no NVIDIA GPU here; planned for {target.name} (sm_{target.arch}); another: target=cuda:sm_NN"
    return probe_target(spec), None
