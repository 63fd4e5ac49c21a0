"""A child process that may crash or hang, with all that it starts: replaced without a trace, its noise kept in a file.

    this process  ->  keeper  ->  worker  ->  whatever it starts

The keeper is a fork that does nothing but wait. Whoever loses its parent below it becomes its child, so it can end all
of them: when the worker ends, when it is told to (SIGTERM), and when this process dies, be it by SIGKILL. Both the
build workers and the device worker are such children. What they do is not known here.
"""

import contextlib
import ctypes
import multiprocessing
import os
import resource
import shutil
import signal
import socket
import struct
import tempfile
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Final, Literal, NoReturn

import msgspec

from tune_model.tune.processes.tree import end_children

__all__ = ["Child", "Ending", "Limits"]

_ORPHANED: Final = signal.SIGUSR1
"""Sent by the system when the parent's thread is gone; the others, and so the process, may be there a little longer."""

_DYING_S: Final = 1.0
"""A parent that is killed takes at most this long from closing its files to being gone."""

_TAIL_BYTES: Final = 2000
_SET_PARENT_DEATH_SIGNAL: Final = 1  # prctl(2): PR_SET_PDEATHSIG
_SET_CHILD_SUBREAPER: Final = 36  # PR_SET_CHILD_SUBREAPER

_END_S: Final = 15.0
"""A process that a GPU's driver cleans up after takes seconds to end."""

_SLICE_S: Final = 0.25
"""How often a wait looks whether the run has to end."""

_MESSAGE_S: Final = 30.0

_MORE_KILLABLE: Final = 500
"""Added to the badness (0 to 1000) by which Linux chooses whom to kill when memory runs out: not the tuner itself."""


class Limits(msgspec.Struct, frozen=True):
    """What a child may use; 0 is no limit.

    Attributes:
        memory_bytes: Private memory it may have mapped, whether touched or not.
        file_bytes: Size of any file it writes, its noise included.
    """

    memory_bytes: int = 0
    file_bytes: int = 0


class Ending(msgspec.Struct, frozen=True):
    """How a child ended.

    Attributes:
        how: `exited with 3`, `killed by SIGSEGV`, `still running`.
        words: The last of what it wrote to standard output and error.
        is_out_of_memory: It said so, or the system killed it for it.
    """

    how: str
    words: str
    is_out_of_memory: bool = False

    def __str__(self) -> str:
        """Return both in one line."""
        return f"{self.how}; last words: {self.words}" if self.words else self.how


class Child:
    """A process that serves one connection until the connection closes.

    Attributes:
        connection: The parent's end.
        process: The keeper's; it ends as the worker does, with the same exit code.
    """

    def __init__(
        self,
        serve: Callable[..., None],
        arguments: tuple[Any, ...],
        name: str,
        limits: Limits | None = None,
        leftovers: tuple[str, ...] = (),
    ) -> None:
        """Start `serve(connection, *arguments)` in a new process; all of it must be importable there.

        `leftovers` are folders of the parent's that the keeper removes where the parent was killed before it could.
        """
        context = multiprocessing.get_context("spawn")
        self.connection: Connection
        self.connection, theirs = context.Pipe()
        handle, noise = tempfile.mkstemp(prefix=f"tune-model-{name}-")
        os.close(handle)
        self.noise = Path(noise)
        self._killed_before = _system_kills()
        self.process = context.Process(
            target=_run,
            args=(serve, theirs, (noise, *leftovers), os.getpid(), limits or Limits(), arguments),
            name=name,
            daemon=True,
        )
        self.process.start()
        theirs.close()
        _never_wait_long(self.connection)

    def wait(self, limit_s: float, seconds_left: Callable[[], float]) -> Literal["", "timeout", "abandoned"]:
        """Wait until there is an answer, or none can come any more, and return "".

        Args:
            limit_s: Longer is a `timeout`.
            seconds_left: Of the run; without any the answer is `abandoned`.
        """
        deadline = time.monotonic() + limit_s
        while True:
            left_s = deadline - time.monotonic()
            if self.connection.poll(max(0.0, min(left_s, seconds_left(), _SLICE_S))):
                return ""
            if left_s <= 0:
                return "timeout"
            if seconds_left() <= 0:
                return "abandoned"

    def kill(self) -> None:
        """End the worker and everything it started, at once."""
        if self.process.is_alive():
            self.process.terminate()
            self.process.join(_END_S)
            self.process.kill()
        self.process.join(1)
        self.connection.close()
        self.noise.unlink(missing_ok=True)

    def post_mortem(self) -> Ending:
        """Say how the process ended and what it said last; call before `kill`."""
        self.process.join(_END_S)
        code = self.process.exitcode
        words = self._tail()
        if code is None:
            return Ending("still running", words)
        if code >= 0:
            return Ending(f"exited with {code}", words, _tells_of_memory(words))
        by_system = code == -signal.SIGKILL and _system_kills() > self._killed_before
        return Ending(f"killed by {_signal_name(-code)}", words, by_system or _tells_of_memory(words))

    def _tail(self) -> str:
        try:
            content = self.noise.read_bytes()[-_TAIL_BYTES:]
        except OSError:
            return ""
        text = "".join(c if c.isprintable() or c == "\n" else "?" for c in content.decode(errors="replace"))
        lines = text.strip().splitlines()
        return " | ".join(line.strip() for line in lines[-4:])


def _never_wait_long(connection: Connection) -> None:
    """Bound how long a message may take once it has begun: half a message from a mad process would block for ever."""
    seconds = struct.pack("ll", int(_MESSAGE_S), 0)
    with socket.socket(fileno=os.dup(connection.fileno())) as end:
        end.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, seconds)
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, seconds)


def _tells_of_memory(words: str) -> bool:
    return any(sign in words for sign in ("std::bad_alloc", "MemoryError", "out of memory", "Cannot allocate memory"))


def _system_kills() -> int:
    """Return how many processes the system killed for memory since it started."""
    try:
        counters = Path("/proc/vmstat").read_text(encoding="ascii")
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in counters.splitlines() if line.startswith("oom_kill ")), 0)


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _run(
    serve: Callable[..., None],
    connection: Connection,
    files: tuple[str, ...],
    parent: int,
    limits: Limits,
    arguments: tuple[Any, ...],
) -> None:
    """Become the keeper, and fork the worker (in the child)."""
    # Ctrl-C reaches the whole foreground group; what happens to the children is the parent's decision.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.setsid()
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # writing out gigabytes would outlast a time limit
    libc = ctypes.CDLL(None)
    libc.prctl(_SET_CHILD_SUBREAPER, 1)
    libc.prctl(_SET_PARENT_DEATH_SIGNAL, _ORPHANED)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, _ORPHANED})
    keeper = os.getpid()
    pid = os.fork()
    if pid:
        connection.close()
        _keep(pid, parent, files)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM, _ORPHANED})
    libc.prctl(_SET_PARENT_DEATH_SIGNAL, signal.SIGKILL)
    if os.getppid() != keeper:
        return
    _confine(files[0], limits)
    with contextlib.suppress(EOFError, BrokenPipeError):
        serve(connection, *arguments)


def _keep(worker: int, parent: int, files: tuple[str, ...]) -> NoReturn:
    """Wait for the worker, end what it left behind, and end in the same way; tidy up for a parent that was killed."""
    orphaned = False

    def stop(number: int, _frame: object) -> None:
        nonlocal orphaned
        orphaned = orphaned or number == _ORPHANED
        with contextlib.suppress(ProcessLookupError):
            os.kill(worker, signal.SIGKILL)

    signal.signal(signal.SIGTERM, stop)
    signal.signal(_ORPHANED, stop)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM, _ORPHANED})
    if os.getppid() != parent:  # it died before it could be asked for a signal
        stop(_ORPHANED, None)
    pid, status = os.waitpid(-1, 0)
    while pid != worker:
        pid, status = os.waitpid(-1, 0)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(_ORPHANED, signal.SIG_IGN)
    end_children(os.getpid())
    ended_by_itself = os.waitstatus_to_exitcode(status) == 0
    if orphaned or _is_orphan(parent, wait_s=_DYING_S if ended_by_itself else 0.0):
        for path in files:
            shutil.rmtree(path, ignore_errors=True)
            with contextlib.suppress(OSError):
                Path(path).unlink()
    code = os.waitstatus_to_exitcode(status)
    if code < 0 and -code != signal.SIGKILL:
        signal.signal(-code, signal.SIG_DFL)
    if code < 0:
        os.kill(os.getpid(), -code)
    os._exit(max(code, 0))


def _is_orphan(parent: int, wait_s: float) -> bool:
    """Say whether the parent is gone; it closes its files, at which a worker ends, a little before it is."""
    until = time.monotonic() + wait_s
    while os.getppid() == parent:
        if time.monotonic() >= until:
            return False
        time.sleep(0.01)
    return True


def _confine(noise: str, limits: Limits) -> None:
    """Send the worker's noise to its file and set its limits."""
    file = os.open(noise, os.O_WRONLY | os.O_APPEND)
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.close(file)
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text(str(_MORE_KILLABLE), encoding="ascii")
    for limit, value in ((resource.RLIMIT_DATA, limits.memory_bytes), (resource.RLIMIT_FSIZE, limits.file_bytes)):
        if value:
            _, hard = resource.getrlimit(limit)
            resource.setrlimit(limit, (value if hard == resource.RLIM_INFINITY else min(value, hard), hard))
