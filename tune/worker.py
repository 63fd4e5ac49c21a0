"""The process that owns a device, and the parent's side of it: a candidate that kills it costs itself only.

The parent sends one message and waits for one answer, with a time limit. When the child dies or hangs it is replaced,
the open task is opened again in the new one, and the candidate at fault is rejected with what the child said last.
"""

import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any, Final

from tune_model.tune.candidate import Built, Candidate, Rejected
from tune_model.tune.child import Child
from tune_model.tune.device import Bench, Device, Passed, Samples
from tune_model.tune.policy import Rung
from tune_model.tune.target import Target

__all__ = ["DeviceWorker", "open_workbench"]

_START_S: Final = 180.0
"""Importing torch and creating a CUDA context on a busy machine."""

_OPEN_S: Final = 300.0
"""Inputs and a float64 reference of a large task."""

_STEP_S: Final = 60.0
"""Checking or timing one candidate; a rung of a race takes milliseconds, so a minute is a hang."""


def open_workbench(target: Target, index: int) -> Device:
    """Open the device in this process (what the child does)."""
    from tune_model.tune.workbench import Workbench

    return Workbench(target, index)


class DeviceWorker:
    """A `Device` in a process of its own.

    Attributes:
        replaced: How many times the process was replaced.
    """

    def __init__(
        self,
        target: Target,
        index: int = 0,
        factory: Callable[[Target, int], Device] = open_workbench,
        step_s: float = _STEP_S,
    ) -> None:
        """Prepare; the process starts with the first task.

        Args:
            target: What to open.
            index: Which GPU.
            factory: Opens the device in the child; importable there.
            step_s: Longest time for one check or timing.
        """
        self.replaced = 0
        self._arguments = (factory, target, index)
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

    def compare(self, candidates: tuple[tuple[Candidate, Built], ...], rung: Rung) -> tuple[Samples | Rejected, ...]:
        """See `Device.compare`. When the process dies meanwhile, each candidate is tried alone to find who did it."""
        limit_s = self._step_s * len(candidates)
        result = self._on_task("compare", (candidates, rung), limit_s)
        if not isinstance(result, Rejected):
            return tuple(result)
        alone = [self._on_task("time", (candidate, built, rung), self._step_s) for candidate, built in candidates]
        if any(isinstance(found, Rejected) for found in alone):
            return tuple(found if isinstance(found, Rejected) else Samples(()) for found in alone)
        again = self._on_task("compare", (candidates, rung), limit_s)
        return tuple(again) if not isinstance(again, Rejected) else tuple(again for _ in candidates)

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
            self._child = Child(_serve, self._arguments, "device")
        child = self._child
        try:
            child.connection.send((method, arguments))
            if not child.connection.poll(limit_s):
                self._discard()
                self.replaced += 1
                return Rejected("timeout", f"{method} took longer than {limit_s:g} s on the device")
            result, broken = child.connection.recv()
        except (EOFError, OSError):
            detail = f"the device process {child.post_mortem()} during {method}"
            self._discard()
            self.replaced += 1
            return Rejected("crash", detail)
        if broken:
            self._discard()
            self.replaced += 1
        return result

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
        result = getattr(device, method)(*arguments)
        connection.send((result, getattr(device, "broken", False)))
        if getattr(device, "broken", False):
            time.sleep(_STEP_S)  # the parent ends this process; leaving by itself could run a destructor that hangs
            return
