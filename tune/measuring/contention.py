"""Whether other processes got in the way of this one's threads: how long threads that could run had to wait for a core.

Linux counts that wait per thread; it hardly grows while every thread has a core. Where the kernel does not tell,
involuntary context switches stand in for it.
"""

import os
import resource
from pathlib import Path
from typing import Final

__all__ = ["Contention"]

_SWITCH_US: Final = 1000.0
"""A thread that was switched off has lost its core for a scheduler's tick or so."""


class Contention:
    """Reads how long this process's threads have waited for a core.

    Args:
        folder: Holds a folder per thread with a file `schedstat`: nanoseconds run, nanoseconds waited, turns.
    """

    def __init__(self, folder: Path = Path("/proc/self/task")) -> None:
        self._folder = folder
        self._is_counted = (folder / str(os.getpid()) / "schedstat").exists()

    def waited_us(self) -> float:
        """Return the wait of all live threads together, since they began."""
        if not self._is_counted:
            return resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw * _SWITCH_US
        return sum(_waited_ns(thread) for thread in self._folder.iterdir()) / 1000.0


def _waited_ns(thread: Path) -> int:
    try:
        return int((thread / "schedstat").read_bytes().split()[1])
    except OSError:  # it ended meanwhile
        return 0
