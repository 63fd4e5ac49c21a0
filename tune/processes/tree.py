"""Which processes came from which, as /proc tells, and ending them."""

import contextlib
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

__all__ = ["children_of", "end_children", "spinning_threads", "strays"]

_SPIN_S: Final = 0.4
"""OpenMP's threads go on looking for work for up to 0.2 s after a parallel loop."""


def children_of(pid: int) -> list[int]:
    """Return the children of a process that still run; what has ended and waits to be collected does not count."""
    found: list[int] = []
    tasks = Path(f"/proc/{pid}/task")
    try:
        lists = [(task / "children").read_text(encoding="ascii") for task in tasks.iterdir()]
    except OSError:  # it has ended, or this kernel keeps no such lists
        return [child for child, parent in _all_processes() if parent == pid]
    for text in lists:
        found += [child for child in map(int, text.split()) if _is_running(child)]
    return found


def strays() -> list[int]:
    """Return what this worker's work has started and left running: its children, and those that its keeper adopted."""
    keeper = os.getppid()
    return [pid for pid in (*children_of(os.getpid()), *children_of(keeper)) if pid != os.getpid()]


def spinning_threads() -> list[int]:
    """Return this process's other threads that do not come to rest although nobody gave them work."""
    me = threading.get_native_id()
    deadline = time.monotonic() + _SPIN_S
    busy = _running_threads() - {me}
    while busy and time.monotonic() < deadline:
        time.sleep(0.002)
        busy &= _running_threads()
    return sorted(busy)


def end_children(pid: int) -> None:
    """End all children of this process, and theirs, which become its own (it is a subreaper) as their parents end."""
    while children := children_of(pid):
        for child in children:
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)
        for child in children:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(child, 0)


def _running_threads() -> set[int]:
    found: set[int] = set()
    for task in Path("/proc/self/task").iterdir():
        try:
            state = (task / "stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()[0]
        except OSError:  # it ended meanwhile
            continue
        if state == "R":
            found.add(int(task.name))
    return found


def _is_running(pid: int) -> bool:
    stat = _stat(pid)
    return stat is not None and stat[0] not in {"Z", "X"}


def _stat(pid: int) -> list[str] | None:
    """Return the fields behind the name: state, parent, ..."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    except OSError:
        return None


def _all_processes() -> Iterator[tuple[int, int]]:
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            stat = _stat(int(entry.name))
            if stat is not None and stat[0] not in {"Z", "X"}:
                yield int(entry.name), int(stat[1])
