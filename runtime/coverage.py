"""Count what calls ran: a tuned kernel at its own grid point, a near one, or the plain operators.

Counts are kept by form and shape, and by the sizes that whole programs were called at. A server writes them down with
`Coverage.save`; `tune-model coverage` and `tune-model CONFIG --add-misses` read them.
"""

import os
import threading
from pathlib import Path
from typing import Final, Literal

import msgspec

from tune_model.runtime.errors import TuneModelError

__all__ = [
    "RECORD_SCHEMA",
    "Coverage",
    "CoverageFileError",
    "CoverageRecord",
    "CoverageRow",
    "ModelIdentity",
    "NotTunedError",
    "Outcome",
    "PointRow",
    "Tally",
    "read_coverage",
]

Outcome = Literal["exact", "near", "miss"]

RECORD_SCHEMA: Final = 2
"""Version of the file that `Coverage.save` writes; 2 says which model it is of. Older files are read."""

_FILE_BYTES_AT_MOST: Final = 256 << 20

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


class PointRow(msgspec.Struct, frozen=True):
    """How often a program ran at one set of sizes.

    Attributes:
        program: Phase.
        sizes: Value of each of its symbols: `{"batch": 3, "context": 512}`.
        runs: How often.
        exact: Tuned steps of one run that ran a kernel tuned at just these sizes.
        near: Those that ran one tuned at other sizes.
        miss: Those that ran their own operators.
    """

    program: str
    sizes: dict[str, int]
    runs: int
    exact: int
    near: int
    miss: int


class ModelIdentity(msgspec.Struct, frozen=True):
    """Which model coverage is of, whatever it was tuned for.

    Attributes:
        name: As its configuration calls it.
        task: `causal-lm`, `encoder` or `forward`.
        source: Where the model comes from, for people, and a digest of what that says of it.
    """

    name: str
    task: str
    source: str


class CoverageRecord(msgspec.Struct, frozen=True):
    """What a server writes down.

    Attributes:
        schema: Version of this form.
        points: Sizes that programs were called at; those with misses first, then the most frequent.
        rows: The same by form and shape.
        uncounted: Calls at shapes that came after the tables were full.
        model: Which model ran; `None` in files of schema 1, and of programs that no artifact holds.
    """

    schema: int
    points: tuple[PointRow, ...]
    rows: tuple[CoverageRow, ...]
    uncounted: int
    model: ModelIdentity | None = None


class CoverageFileError(TuneModelError):
    """A file is not what `Coverage.save` writes."""


def read_coverage(path: str | os.PathLike[str]) -> CoverageRecord:
    """Read what `Coverage.save` wrote.

    Raises:
        CoverageFileError: It is something else, or of another version.
        OSError: It cannot be read.
    """
    place = Path(path)
    with place.open("rb") as file:
        data = file.read(_FILE_BYTES_AT_MOST + 1)
    if len(data) > _FILE_BYTES_AT_MOST:
        raise CoverageFileError(f"{place}: is larger than {_FILE_BYTES_AT_MOST} bytes; expected saved coverage")
    try:
        record = msgspec.json.decode(data, type=CoverageRecord)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise CoverageFileError(f"{place}: {error}; expected what coverage().save(path) writes") from error
    if not 1 <= record.schema <= RECORD_SCHEMA:
        raise CoverageFileError(f"{place}: $.schema is {record.schema}; expected 1 to {RECORD_SCHEMA}; save it again")
    return record


Sizes = tuple[tuple[str, int], ...]


class Tally:
    """How often one plan ran; its rows hold the calls of a single run.

    Args:
        rows: Of one run.
        program: Phase that the plan is of; empty for a single operator.
        sizes: Value of each of its symbols.
    """

    def __init__(self, rows: tuple[CoverageRow, ...], program: str = "", sizes: Sizes = ()) -> None:
        self.rows = rows
        self.program = program
        self.sizes = sizes
        self.runs = 0

    def point(self) -> PointRow:
        """Return the plan's sizes and what one run of it runs; without the number of runs."""
        counts = {"exact": 0, "near": 0, "miss": 0}
        for row in self.rows:
            counts[row.outcome] += row.calls
        return PointRow(self.program, dict(self.sizes), 0, **counts)


class Coverage:
    """Counters shared by the programs of one artifact; safe to use from several threads.

    Args:
        model: Whose programs they are, for the file.
    """

    def __init__(self, model: ModelIdentity | None = None) -> None:
        self._model = model
        self._lock = threading.Lock()
        self._live: list[Tally] = []
        self._retired: dict[CoverageRow, int] = {}
        self._retired_points: dict[tuple[str, Sizes], tuple[PointRow, int]] = {}
        self._uncounted = 0

    def add(self, tally: Tally) -> None:
        """Count what `tally` counts from now on; its owner adds to `runs`."""
        with self._lock:
            self._live.append(tally)

    def retire(self, tally: Tally) -> None:
        """Keep the counts of a plan that is dropped, not the plan's tally."""
        with self._lock:
            self._live.remove(tally)
            key = (tally.program, tally.sizes)
            point, runs = self._retired_points.get(key, (tally.point(), 0))
            if tally.program and (runs or len(self._retired_points) < _ROWS_AT_MOST):
                self._retired_points[key] = (point, runs + tally.runs)
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

    def points(self) -> tuple[PointRow, ...]:
        """Return the sizes that programs ran at: those with misses first, then near ones, then the most frequent.

        Single operators (`TunedModel.operators`) are of no program, and only among the rows.
        """
        with self._lock:
            found = dict(self._retired_points)
            for tally in self._live:
                if not tally.program:
                    continue
                key = (tally.program, tally.sizes)
                point, runs = found.get(key, (tally.point(), 0))
                found[key] = (point, runs + tally.runs)
        rows = [msgspec.structs.replace(point, runs=runs) for point, runs in found.values() if runs]
        return tuple(sorted(rows, key=lambda r: (not r.miss, not r.near, -r.runs, r.program, *r.sizes.items())))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write everything counted so far as JSON, replacing the file at once or not at all.

        For a server to call now and then, or when it ends; a later call writes the sums, not the difference.

        Raises:
            OSError: It cannot be written there.
        """
        record = CoverageRecord(RECORD_SCHEMA, self.points(), self.rows(), self.uncounted, self._model)
        place = Path(path)
        partial = place.with_name(f".{place.name}.partial-{os.getpid():x}-{os.urandom(4).hex()}")
        try:
            partial.write_bytes(msgspec.json.format(msgspec.json.encode(record), indent=1) + b"\n")
            partial.replace(place)
        finally:
            partial.unlink(missing_ok=True)

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
