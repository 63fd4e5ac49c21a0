"""From the text of a target, as a configuration gives it, to the machine it means."""

import re

from tune_model.tune.target import Target, TargetError

__all__ = ["TargetError", "probe_target"]


def probe_target(spec: str) -> Target:
    """Return the machine to tune for.

    Args:
        spec: `auto` (a GPU if there is one, else the CPU), `cpu`, `cuda` (this machine's GPU), or `cuda:sm_90`: this
            machine's GPU if it is of that architecture, else a typical one, for planning and compiling only.

    Raises:
        TargetError: No such target, or no GPU for `cuda`.
    """
    from tune_model.tune.probe_cuda import has_gpu, offline_cuda, probe_cuda

    if spec == "auto":
        spec = "cuda" if has_gpu() else "cpu"
    if spec == "cpu":
        from tune_model.tune.probe_cpu import probe_cpu

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
