"""What the CPU of this machine is: instruction set, caches, threads, compiler."""

import platform
import re
from collections.abc import Iterable
from pathlib import Path

import torch

from tune_model.tune.cpp.compile import compiler_version
from tune_model.tune.target import CpuTarget

__all__ = ["parse_cpuinfo", "probe_cpu"]

# What generated code and the libraries' kernels may make use of; a fingerprint of all flags would tell machines apart
# that run the same code.
_RELEVANT = re.compile(r"avx\w*|fma|f16c|bmi[12]|amx_\w+|asimd\w*|sve\w*|bf16|i8mm|fphp")


def parse_cpuinfo(text: str) -> tuple[str, tuple[str, ...]]:
    """Return the model name and the relevant instruction-set flags, sorted, from the text of /proc/cpuinfo."""
    name = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    flags = re.search(r"^(?:flags|Features)\s*:\s*(.+)$", text, re.MULTILINE)
    words: Iterable[str] = flags[1].split() if flags else ()
    return (name[1].strip() if name else "unknown"), tuple(sorted({w for w in words if _RELEVANT.fullmatch(w)}))


def _cache_bytes(level: int) -> int:
    """Return the size of core 0's cache of a level; 0 when the system does not say."""
    for folder in sorted(Path("/sys/devices/system/cpu/cpu0/cache").glob("index*")):
        try:
            kind = (folder / "type").read_text(encoding="ascii").strip()
            if int((folder / "level").read_text(encoding="ascii")) == level and kind != "Instruction":
                size = (folder / "size").read_text(encoding="ascii").strip()
                return int(size.rstrip("KMG")) * {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}.get(size[-1], 1)
        except (OSError, ValueError):
            continue
    return 0


def probe_cpu() -> CpuTarget:
    """Look at this machine; kernels will run with as many threads as torch uses now.

    Raises:
        CompilerMissingError: There is no g++ on PATH.
    """
    cpuinfo = Path("/proc/cpuinfo")
    name, isa = parse_cpuinfo(cpuinfo.read_text(encoding="utf-8") if cpuinfo.exists() else "")
    return CpuTarget(
        machine=platform.machine(),
        isa=isa,
        name=name,
        threads=torch.get_num_threads(),
        l2_bytes=_cache_bytes(2),
        l3_bytes=_cache_bytes(3),
        compiler=compiler_version(),
        torch=".".join(torch.__version__.split(".")[:2]),
    )
