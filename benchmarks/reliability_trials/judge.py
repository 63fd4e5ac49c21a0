"""Runs numbered cases in a process that may die, hang or grow: each is loaded, refused, or unexpected."""

import contextlib
import logging
import multiprocessing
import resource
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Final

import msgspec

__all__ = ["PROMISED", "Limits", "Tally", "judge"]


class Limits(msgspec.Struct, frozen=True):
    """What a case may take.

    Attributes:
        seconds: Of wall time or, with `on_cpu`, on a core; a machine that is busy with other things adds to the former.
        megabytes: Of resident memory beyond what the process holds before the case.
        on_cpu: Which seconds are meant.
    """

    seconds: float
    megabytes: float
    on_cpu: bool = False


PROMISED: Final = Limits(2.0, 500.0)
"""What the project promises of any input."""

_GIVE_UP_S: Final = 30.0
_HARD_BYTES: Final = 6 << 30

Prepare = Callable[[Path], Any]
"""Makes the material in a folder."""

Make = Callable[[Any, int], tuple[str, Callable[[], bool]]]
"""Makes a case of the material; returns its kind, and what reads it, which is what is measured.

Reading says whether it was loaded, `False` when it was refused; what it raises was not expected.
"""


class Tally(msgspec.Struct):
    """What became of some cases.

    Attributes:
        cases: How many.
        loaded: As what they say.
        refused: With an error of this project.
        unexpected: Case and what happened, for all others.
        slowest_s: Longest time of a case, of the kind that was limited.
        largest_mb: Most memory that a case took.
        kinds: Cases by kind, and how many of them were loaded.
    """

    cases: int = 0
    loaded: int = 0
    refused: int = 0
    unexpected: list[tuple[int, str]] = []
    slowest_s: float = 0.0
    largest_mb: float = 0.0
    kinds: dict[str, tuple[int, int]] = {}

    def add(self, case: int, kind: str, outcome: str, took: tuple[float, float], limits: Limits = PROMISED) -> None:
        """Count a case; `outcome` is `loaded`, `refused` or what was unexpected, `took` its seconds and megabytes."""
        seconds, megabytes = took
        self.cases += 1
        self.slowest_s = max(self.slowest_s, seconds)
        self.largest_mb = max(self.largest_mb, megabytes)
        total, loaded = self.kinds.get(kind, (0, 0))
        self.kinds[kind] = (total + 1, loaded + (outcome == "loaded"))
        if outcome in {"loaded", "refused"} and seconds >= limits.seconds:
            outcome = f"{kind}: took {seconds:.1f} s"
        if outcome in {"loaded", "refused"} and megabytes >= limits.megabytes:
            outcome = f"{kind}: took {megabytes:.0f} MB"
        if outcome == "loaded":
            self.loaded += 1
        elif outcome == "refused":
            self.refused += 1
        else:
            self.unexpected.append((case, outcome))


def judge(prepare: Prepare, make: Make, cases: range, limits: Limits = PROMISED) -> Tally:
    """Run cases; one that ends its process or takes far too long costs itself only."""
    tally = Tally()
    waiting = list(cases)
    while waiting:
        with tempfile.TemporaryDirectory(prefix="tune-model-fuzz-", ignore_cleanup_errors=True) as folder:
            _judge(prepare, make, (waiting, limits), Path(folder), tally)
    return tally


def _judge(prepare: Prepare, make: Make, work: tuple[list[int], Limits], folder: Path, tally: Tally) -> None:
    """Run the cases that wait in one process, until they are done or one ends it; takes out what was judged."""
    waiting, limits = work
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    arguments = (theirs, prepare, make, list(waiting), folder, limits.on_cpu)
    process = context.Process(target=_serve, args=arguments, daemon=True)
    process.start()
    theirs.close()
    first = len(waiting)
    try:
        while waiting:
            # The first answer includes imports and the material.
            if not ours.poll(_GIVE_UP_S * 4 if len(waiting) == first else _GIVE_UP_S):
                tally.add(waiting.pop(0), "unknown", f"still running after {_GIVE_UP_S:g} s", (_GIVE_UP_S, 0.0))
                break
            case, kind, outcome, took = ours.recv()
            waiting.remove(case)
            tally.add(case, kind, outcome, took, limits)
    except EOFError:
        process.join()
        tally.add(waiting.pop(0), "unknown", f"ended the process with {process.exitcode}", (0.0, 0.0))
    finally:
        process.kill()
        process.join()
        ours.close()


def _serve(connection: Connection, prepare: Prepare, make: Make, cases: list[int], folder: Path, on_cpu: bool) -> None:
    logging.disable()  # what is damaged is said for each case
    resource.setrlimit(resource.RLIMIT_DATA, (_HARD_BYTES, resource.getrlimit(resource.RLIMIT_DATA)[1]))
    material = prepare(folder)
    for case in cases:
        kind, read = make(material, case)
        connection.send((case, kind, *_measured(kind, read, time.process_time if on_cpu else time.perf_counter)))


def _measured(kind: str, read: Callable[[], bool], clock: Callable[[], float]) -> tuple[str, tuple[float, float]]:
    before = _forget_peak()
    began = clock()
    try:
        outcome = "loaded" if read() else "refused"
    except BaseException as error:  # noqa: BLE001 (whatever it is, it was not expected)
        where = traceback.extract_tb(error.__traceback__)[-1]
        outcome = f"{kind}: {type(error).__name__}: {str(error)[:200]} ({Path(where.filename).name}:{where.lineno})"
    return outcome, (clock() - began, max(_memory("VmHWM") - before, 0) / (1 << 20))


def _forget_peak() -> int:
    """Let the peak of resident memory begin anew; returns what is resident now."""
    with contextlib.suppress(OSError):  # else only a case larger than all before it shows
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    return _memory("VmRSS")


def _memory(field: str) -> int:
    for line in Path("/proc/self/status").read_text(encoding="ascii", errors="replace").splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    return 0
