"""Count what calls ran: a tuned kernel at its own grid point, a near one, or the plain operators."""

import threading
from typing import Literal

import msgspec

from tune_model.runtime.errors import TuneModelError

__all__ = ["Coverage", "CoverageRow", "NotTunedError", "Outcome", "Tally"]

Outcome = Literal["exact", "near", "miss"]

_ROWS_AT_MOST = 20_000
"""Distinct (program, form, dims) that are told apart; past that, calls are only counted."""


class NotTunedError(TuneModelError):
    """A strict program was called at a shape for which nothing legal is tuned."""

    exit_code = 4


class CoverageRow(msgspec.Struct, frozen=True):
    """How often one form ran at one shape, and on what.

    Attributes:
        program: Phase.
        form: Fingerprint.
        label: For people: the form's kind and operators.
        dims: Value of each of the form's dims.
        outcome: `exact`, `near` (tuned at another grid point) or `miss` (the form's own operators ran).
        candidate: Label of what ran; empty for a miss.
        tuned_at: Dims of the entry that ran; for a miss, of the nearest entry; `None` when the form has no entry.
        reasons: Why nearer entries were passed over.
        calls: How often.
    """

    program: str
    form: str
    label: str
    dims: tuple[int, ...]
    outcome: Outcome
    candidate: str
    tuned_at: tuple[int, ...] | None
    reasons: tuple[str, ...]
    calls: int


class Tally:
    """How often one plan ran; its rows hold the calls of a single run."""

    def __init__(self, rows: tuple[CoverageRow, ...]) -> None:
        self.rows = rows
        self.runs = 0


class Coverage:
    """Counters shared by the programs of one artifact; safe to use from several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._live: list[Tally] = []
        self._retired: dict[CoverageRow, int] = {}
        self._uncounted = 0

    def add(self, tally: Tally) -> None:
        """Count what `tally` counts from now on; its owner adds to `runs`."""
        with self._lock:
            self._live.append(tally)

    def retire(self, tally: Tally) -> None:
        """Keep the counts of a plan that is dropped, not the plan's tally."""
        with self._lock:
            self._live.remove(tally)
            for row in tally.rows:
                if row in self._retired or len(self._retired) < _ROWS_AT_MOST:
                    self._retired[row] = self._retired.get(row, 0) + tally.runs * row.calls
                else:
                    self._uncounted += tally.runs * row.calls

    def rows(self) -> tuple[CoverageRow, ...]:
        """Return everything that ran, misses first, then the most frequent."""
        with self._lock:
            calls: dict[CoverageRow, int] = {}
            counted = [(row, count) for row, count in self._retired.items()]
            counted += [(row, tally.runs * row.calls) for tally in self._live for row in tally.rows]
            for row, count in counted:
                bare = msgspec.structs.replace(row, calls=0)
                calls[bare] = calls.get(bare, 0) + count
        rows = [msgspec.structs.replace(row, calls=count) for row, count in calls.items() if count]
        order = {"miss": 0, "near": 1, "exact": 2}
        return tuple(sorted(rows, key=lambda r: (order[r.outcome], -r.calls, r.program, r.form, r.dims)))

    @property
    def uncounted(self) -> int:
        """Calls at shapes that came after the table was full."""
        return self._uncounted

    def totals(self) -> dict[Outcome, int]:
        """Return the number of calls of each outcome."""
        totals: dict[Outcome, int] = {"exact": 0, "near": 0, "miss": 0}
        for row in self.rows():
            totals[row.outcome] += row.calls
        return totals
