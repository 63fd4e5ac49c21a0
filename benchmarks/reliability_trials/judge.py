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

__all__ = ["BYTES_AT_MOST", "SECONDS_AT_MOST", "Tally", "judge"]

SECONDS_AT_MOST: Final = 2.0
BYTES_AT_MOST: Final = 500 << 20
"""That a case may take beyond what the process holds before it."""

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
        slowest_s: Longest time of a case.
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

    def add(self, case: int, kind: str, outcome: str, seconds: float, grown: int) -> None:
        """Count a case; `outcome` is `loaded`, `refused` or what was unexpected."""
        self.cases += 1
        self.slowest_s = max(self.slowest_s, seconds)
        self.largest_mb = max(self.largest_mb, grown / (1 << 20))
        total, loaded = self.kinds.get(kind, (0, 0))
        self.kinds[kind] = (total + 1, loaded + (outcome == "loaded"))
        if outcome in {"loaded", "refused"} and seconds >= SECONDS_AT_MOST:
            outcome = f"{kind}: took {seconds:.1f} s"
        if outcome in {"loaded", "refused"} and grown >= BYTES_AT_MOST:
            outcome = f"{kind}: took {grown >> 20} MB"
        if outcome == "loaded":
            self.loaded += 1
        elif outcome == "refused":
            self.refused += 1
        else:
            self.unexpected.append((case, outcome))


def judge(prepare: Prepare, make: Make, cases: range) -> Tally:
    """Run cases; one that ends its process or takes far too long costs itself only."""
    tally = Tally()
    waiting = list(cases)
    context = multiprocessing.get_context("spawn")
    while waiting:
        ours, theirs = context.Pipe()
        process = context.Process(target=_serve, args=(theirs, prepare, make, waiting), daemon=True)
        process.start()
        theirs.close()
        try:
            while waiting:
                # The first answer includes imports and the material.
                if not ours.poll(_GIVE_UP_S * 4 if len(waiting) == len(cases) else _GIVE_UP_S):
                    tally.add(waiting.pop(0), "unknown", f"still running after {_GIVE_UP_S:g} s", _GIVE_UP_S, 0)
                    break
                case, kind, outcome, seconds, grown = ours.recv()
                waiting.remove(case)
                tally.add(case, kind, outcome, seconds, grown)
        except EOFError:
            process.join()
            tally.add(waiting.pop(0), "unknown", f"ended the process with {process.exitcode}", 0.0, 0)
        finally:
            process.kill()
            process.join()
            ours.close()
    return tally


def _serve(connection: Connection, prepare: Prepare, make: Make, cases: list[int]) -> None:
    logging.disable()  # what is damaged is said for each case
    resource.setrlimit(resource.RLIMIT_DATA, (_HARD_BYTES, resource.getrlimit(resource.RLIMIT_DATA)[1]))
    with tempfile.TemporaryDirectory(prefix="tune-model-fuzz-") as name:
        material = prepare(Path(name))
        for case in cases:
            connection.send((case, *_measured(*make(material, case))))


def _measured(kind: str, read: Callable[[], bool]) -> tuple[str, str, float, int]:
    before = _forget_peak()
    began = time.perf_counter()
    try:
        outcome = "loaded" if read() else "refused"
    except BaseException as error:  # noqa: BLE001 (whatever it is, it was not expected)
        where = traceback.extract_tb(error.__traceback__)[-1]
        outcome = f"{kind}: {type(error).__name__}: {str(error)[:200]} ({Path(where.filename).name}:{where.lineno})"
    return kind, outcome, time.perf_counter() - began, max(_memory("VmHWM") - before, 0)


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
