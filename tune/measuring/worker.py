"""The process that owns a device, and the parent's side of it: a candidate that kills it costs itself only.

The parent sends one message and waits for one answer, with a time limit. When the child dies or hangs it is replaced,
the open task is opened again in the new one, and the candidate at fault is rejected with what the child said last. So
is one that left processes running, or that talked.
"""

import ctypes
import math
import os
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any, Final

from tune_model.tune.candidate import Built, Candidate, Rejected
from tune_model.tune.device import Bench, Device, Passed, Samples
from tune_model.tune.measuring.memory import limit_for_measuring
from tune_model.tune.measuring.policy import Rung
from tune_model.tune.processes.answers import ANSWER_AT_MOST, Answer, AnswerError, Found, decode_answer, encode_answer
from tune_model.tune.processes.child import Child, Limits
from tune_model.tune.processes.tree import spinning_threads, strays
from tune_model.tune.target import CpuTarget, Target

__all__ = ["DeviceWorker", "open_workbench"]

_START_S: Final = 180.0
"""Importing torch and creating a CUDA context on a busy machine."""

_OPEN_S: Final = 300.0
"""Inputs and a float64 reference of a large task."""

_STEP_S: Final = 60.0
"""Checking or timing one candidate; a rung of a race takes milliseconds, so a minute is a hang."""

_FILE_BYTES: Final = 128 << 20
"""Largest file the process may write: twice the largest kernel. A candidate that prints without end fills no disk."""

_NOISE_BYTES: Final = 64 << 10
"""Kernels are silent; a library may warn once."""


def open_workbench(target: Target, index: int) -> Device:
    """Open the device in this process (what the child does)."""
    from tune_model.tune.measuring.workbench import Workbench

    return Workbench(target, index)


class DeviceWorker:
    """A `Device` in a process of its own.

    Attributes:
        replaced: How many times the process was replaced.
        seconds_left: Says how long a wait may still be because the whole run has to end.
    """

    def __init__(
        self,
        target: Target,
        index: int = 0,
        factory: Callable[[Target, int], Device] = open_workbench,
        step_s: float = _STEP_S,
        memory_bytes: int | None = None,
    ) -> None:
        """Prepare; the process starts with the first task.

        Args:
            target: What to open.
            index: Which GPU.
            factory: Opens the device in the child; importable there.
            step_s: Longest time for one check or timing.
            memory_bytes: Private memory that the process may map; by default nearly all that is left for a CPU, and
                no limit for a GPU, whose driver maps far more than it uses.
        """
        self.replaced = 0
        self.seconds_left: Callable[[], float] = lambda: math.inf
        self._arguments = (factory, target, index)
        self._memory_bytes = memory_bytes
        self._step_s = step_s
        self._child: Child | None = None
        self._bench: Bench | None = None
        self._is_open = False

    def open(self, bench: Bench) -> Passed | Rejected:
        """See `Device.open`."""
        self._bench = bench
        result = self._ask("open", (bench,), _START_S + _OPEN_S)
        self._is_open = isinstance(result, Passed)
        return result  # type: ignore[no-any-return]

    def check(self, candidate: Candidate, built: Built) -> Passed | Rejected:
        """See `Device.check`."""
        return self._on_task("check", (candidate, built), self._step_s)  # type: ignore[no-any-return]

    def time(self, candidate: Candidate, built: Built, rung: Rung) -> Samples | Rejected:
        """See `Device.time`."""
        return self._on_task("time", (candidate, built, rung), self._step_s)  # type: ignore[no-any-return]

    def compare(
        self, candidates: tuple[tuple[Candidate, Built], ...], rung: Rung
    ) -> tuple[Samples | Rejected, ...] | Rejected:
        """See `Device.compare`.

        When the process dies meanwhile, or something is written over, each candidate is tried alone to find who did it,
        then each beside the extern; where nobody did, all of them once more.
        """
        result = self._compare(candidates, rung)
        if not isinstance(result, Rejected) or result.reason == "abandoned":
            return result
        found = [self._on_task("time", (candidate, built, rung), self._step_s) for candidate, built in candidates]
        if len(candidates) > 2 and not any(isinstance(one, Rejected) for one in found):
            found = [found[0], *(self._beside(candidates[0], rival, rung) for rival in candidates[1:])]
        if any(isinstance(one, Rejected) for one in found):
            return tuple(one if isinstance(one, Rejected) else Samples(()) for one in found)
        return self._compare(candidates, rung)

    def _compare(
        self, candidates: tuple[tuple[Candidate, Built], ...], rung: Rung
    ) -> tuple[Samples | Rejected, ...] | Rejected:
        found = self._on_task("compare", (candidates, rung), self._step_s * len(candidates))
        return found if isinstance(found, Rejected) else tuple(found)

    def _beside(
        self, extern: tuple[Candidate, Built], rival: tuple[Candidate, Built], rung: Rung
    ) -> Samples | Rejected:
        """Time a candidate that does not fail alone beside the extern, which does not either."""
        found = self._compare((extern, rival), rung)
        return found if isinstance(found, Rejected) else found[1]

    def finish(self) -> None:
        """See `Device.finish`."""
        self._bench = None
        self._is_open = False
        if self._child is not None:
            self._ask("finish", (), self._step_s)

    def close(self) -> None:
        """See `Device.close`."""
        self._discard()

    def _on_task(self, method: str, arguments: tuple[Any, ...], limit_s: float) -> Any:
        """Ask about the open task, opening it again if the process was replaced."""
        if self._bench is None:
            raise RuntimeError("no task is open on this device")
        if not self._is_open:
            opened = self._ask("open", (self._bench,), _START_S + _OPEN_S)
            if isinstance(opened, Rejected):
                return opened
            self._is_open = True
        return self._ask(method, arguments, limit_s)

    def _ask(self, method: str, arguments: tuple[Any, ...], limit_s: float) -> Any:
        if self._child is None:
            self._child = Child(_serve, self._arguments, "device", self._limits())
        child = self._child
        try:
            child.connection.send((method, arguments))
            over = child.wait(limit_s, self.seconds_left)
            if over:
                self._replace()
                return Rejected(over, f"{method} took longer than {limit_s:g} s on the device")
            answer = decode_answer(child.connection.recv_bytes(ANSWER_AT_MOST))
        except AnswerError as error:
            self._replace()
            return Rejected("crash", f"the device process answered {method} with garbage: {error}")
        except (EOFError, OSError):
            ending = child.post_mortem()
            self._replace()
            reason = "out of memory" if ending.is_out_of_memory else "crash"
            return Rejected(reason, f"the device process {ending} during {method}")
        if answer.broken:
            self._replace()
        return answer.found

    def _limits(self) -> Limits:
        on_cpu = isinstance(self._arguments[1], CpuTarget)
        if self._memory_bytes is not None:
            return Limits(self._memory_bytes, _FILE_BYTES)
        return Limits(limit_for_measuring(), _FILE_BYTES) if on_cpu else Limits()

    def _replace(self) -> None:
        self._discard()
        self.replaced += 1

    def _discard(self) -> None:
        self._is_open = False
        if self._child is not None:
            self._child.kill()
            self._child = None


def _serve(connection: Connection, factory: Callable[[Target, int], Device], target: Target, index: int) -> None:
    """Answer until the connection closes (in the child)."""
    device = factory(target, index)
    while True:
        method, arguments = connection.recv()
        _forget_noise()
        found: Found = getattr(device, method)(*arguments)
        answer = _watched(Answer(found, getattr(device, "broken", False)), method)
        connection.send_bytes(encode_answer(answer))
        if answer.broken:
            time.sleep(_STEP_S)  # the parent ends this process; leaving by itself could run a destructor that hangs
            return


def _watched(answer: Answer, method: str) -> Answer:
    """Reject what a candidate did besides computing: start processes that still run, or print."""
    if method not in {"check", "time", "compare"} or isinstance(answer.found, Rejected):
        return answer
    spinning = spinning_threads() if method == "check" else []
    if spinning:
        return Answer(Rejected("processes", f"left {len(spinning)} threads running after {method}"), broken=True)
    left = strays()
    if left:
        return Answer(Rejected("processes", f"left {len(left)} processes running after {method}"), broken=True)
    noise = _noise_bytes()
    if noise > _NOISE_BYTES:
        return Answer(Rejected("output", f"wrote {noise} bytes to standard output or error during {method}"))
    return answer


def _forget_noise() -> None:
    """Empty the file behind standard output and error: what is in it later was said by the candidate at work."""
    _noise_bytes()
    os.ftruncate(1, 0)


def _noise_bytes() -> int:
    ctypes.CDLL(None).fflush(None)
    return os.fstat(1).st_size
