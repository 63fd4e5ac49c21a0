"""How much memory is left on this machine, as the kernel and its control groups tell."""

from pathlib import Path
from typing import Final

__all__ = ["available_bytes", "limit_for_builds", "limit_for_measuring"]

_LEAST: Final = 4 << 30
"""Importing torch or a compiler takes a good part of it: below that a limit would refuse everything."""


def available_bytes(root: Path = Path("/")) -> int:
    """Return what new processes may use before something has to be swapped out or killed; 0 where nothing tells.

    Args:
        root: Of the file system with `proc` and `sys`.
    """
    meminfo = _lines(root / "proc/meminfo")
    found = [int(line.split()[1]) * 1024 for line in meminfo if line.startswith("MemAvailable:")]
    for limit, used in (
        ("sys/fs/cgroup/memory.max", "sys/fs/cgroup/memory.current"),
        ("sys/fs/cgroup/memory/memory.limit_in_bytes", "sys/fs/cgroup/memory/memory.usage_in_bytes"),
    ):
        at_most, now = _number(root / limit), _number(root / used)
        if at_most is not None and now is not None:
            found.append(max(at_most - now, 0))
    return min(found, default=0)


def limit_for_measuring() -> int:
    """Return the memory that the process which measures on the CPU may have: all that is left, but a tenth."""
    return max(_LEAST, available_bytes() * 9 // 10)


def limit_for_builds() -> int:
    """Return the memory that one build process, or a compiler it starts, may have: half of what is left."""
    return max(_LEAST, available_bytes() // 2)


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return []


def _number(path: Path) -> int | None:
    text = "".join(_lines(path)[:1]).strip()
    return int(text) if text.isdigit() else None
