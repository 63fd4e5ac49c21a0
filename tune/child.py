"""A child process that may crash or hang: started with spawn, in a process group of its own, its noise kept in a file.

Both the build workers and the device worker are such children. What they do is not known here.
"""

import contextlib
import ctypes
import multiprocessing
import os
import signal
import sys
import tempfile
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Final

__all__ = ["Child"]

_TAIL_BYTES: Final = 2000
_PARENT_DEATH_SIGNAL: Final = 1  # PR_SET_PDEATHSIG


class Child:
    """A process that serves one connection until the connection closes.

    Attributes:
        connection: The parent's end.
        process: For its exit code and sentinel.
    """

    def __init__(self, serve: Callable[..., None], arguments: tuple[Any, ...], name: str) -> None:
        """Start `serve(connection, *arguments)` in a new process; all of it must be importable there."""
        context = multiprocessing.get_context("spawn")
        self.connection: Connection
        self.connection, theirs = context.Pipe()
        handle, noise = tempfile.mkstemp(prefix=f"tune-model-{name}-")
        os.close(handle)
        self.noise = Path(noise)
        self.process = context.Process(
            target=_run, args=(serve, theirs, noise, os.getpid(), arguments), name=name, daemon=True
        )
        self.process.start()
        theirs.close()

    def kill(self) -> None:
        """End the process and everything it started, at once."""
        pid = self.process.pid
        if pid is not None and self.process.is_alive():
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(pid, signal.SIGKILL)
            self.process.kill()
        self.process.join(10)
        self.connection.close()
        self.noise.unlink(missing_ok=True)

    def post_mortem(self) -> str:
        """Say how the process ended and the last of what it wrote to standard error; call before `kill`."""
        self.process.join(5)
        code = self.process.exitcode
        if code is None:
            ended = "still running"
        elif code < 0:
            ended = f"killed by {_signal_name(-code)}"
        else:
            ended = f"exited with {code}"
        said = self._tail()
        return f"{ended}; last words: {said}" if said else ended

    def _tail(self) -> str:
        try:
            content = self.noise.read_bytes()[-_TAIL_BYTES:]
        except OSError:
            return ""
        lines = content.decode(errors="replace").strip().splitlines()
        return " | ".join(line.strip() for line in lines[-4:])


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _run(
    serve: Callable[..., None], connection: Connection, noise: str, parent: int, arguments: tuple[Any, ...]
) -> None:
    # Ctrl-C reaches the whole foreground group; what happens to the children is the parent's decision.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.setsid()
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PARENT_DEATH_SIGNAL, signal.SIGKILL)
        if os.getppid() != parent:
            return
    file = os.open(noise, os.O_WRONLY | os.O_APPEND)
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.close(file)
    with contextlib.suppress(EOFError, BrokenPipeError):
        serve(connection, *arguments)
