"""Every measurement, rejection and outcome, in one SQLite database that all models and all tuners share.

One row per fact, committed before the next measurement starts, so a killed tuner loses at most the candidate in flight.
A row holds no time of day, path or host name. Rows are never changed; of several for one key the last counts.
"""

import hashlib
import logging
import sqlite3
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final

import msgspec

from tune_model.runtime.errors import TuneModelError
from tune_model.tune.candidate import Candidate, Rejected

__all__ = ["Confirmation", "Finalist", "Outcome", "Records", "RecordsError", "Timing"]

logger = logging.getLogger(__name__)

SCHEMA_VERSION: Final = 2
"""2 added confirmations; a database of version 1 is read and written on."""

_BUSY_TIMEOUT_S: Final = 60.0
_TABLES: Final = """
create table if not exists records (
    id integer primary key,
    key text not null,
    kind text not null,
    task text not null,
    body text not null,
    digest text not null unique
);
create index if not exists records_by_key on records (key, kind);
create index if not exists records_by_task on records (task);
"""


class RecordsError(TuneModelError):
    """The records database cannot be opened or written."""


class Timing(msgspec.Struct, frozen=True, tag="timing"):
    """One timing of one candidate in a race.

    Attributes:
        candidate: What was timed.
        rung: Of the race's ladder, 0 first; a final and the guard are numbered after the last.
        stage: `race`, `final` or `guard`.
        median_us: Per call.
        low_us: 20th percentile.
        high_us: 80th percentile.
        samples: How many rounds.
        error: Relative Frobenius error against the reference.
        disturbed: Throttling, contention or drift was seen.
    """

    candidate: Candidate
    rung: int
    stage: str
    median_us: float
    low_us: float
    high_us: float
    samples: int
    error: float
    disturbed: bool = False


class Refusal(msgspec.Struct, frozen=True, tag="refusal"):
    """A candidate that is out."""

    candidate: Candidate
    rejected: Rejected


class Finalist(msgspec.Struct, frozen=True):
    """A candidate's result in a final.

    Attributes:
        candidate: The first of a final is the extern.
        layouts: The kernel's demands on weights, as in `Kernel.layouts`.
        median_us: In the final.
        gain: Median of the paired ratios extern / candidate.
        gain_low: Lower end of their 95 % interval.
        gain_high: Upper end.
        complexity: Steps and workspaces of the kernel; of two equally fast ones the simpler wins.
        unconditional: The kernel states no requirement, so it may be a packed weight's fallback.
        doubtful: Other processes were in the way throughout the final: it decides nothing.
    """

    candidate: Candidate
    layouts: tuple[tuple[str, str], ...]
    median_us: float
    gain: float
    gain_low: float
    gain_high: float
    complexity: int
    unconditional: bool
    doubtful: bool = False


class Outcome(msgspec.Struct, frozen=True, tag="outcome"):
    """A finished race.

    Attributes:
        finalists: The extern first, the others fastest first.
        failed: Why the task could not be measured; empty otherwise.
    """

    finalists: tuple[Finalist, ...]
    failed: str = ""


class Confirmation(msgspec.Struct, frozen=True, tag="confirmation"):
    """A winner measured again: beside the extern, in a fresh process, with other inputs (`guard`).

    Attributes:
        candidate: Which.
        median_us: Its time; 0 when it was not timed.
        baseline_us: The extern's in the same rounds.
        gain: Median of the paired ratios extern / candidate.
        gain_low: Lower end of their 95 % interval.
        gain_high: Upper end.
        failed: Why it cannot be used at all; empty otherwise.
        doubtful: Other processes were in the way throughout: it confirms nothing.
    """

    candidate: Candidate
    median_us: float = 0.0
    baseline_us: float = 0.0
    gain: float = 0.0
    gain_low: float = 0.0
    gain_high: float = 0.0
    failed: str = ""
    doubtful: bool = False


Body = Timing | Refusal | Outcome | Confirmation
_KINDS: Final = {Timing: "timing", Refusal: "refusal", Outcome: "outcome", Confirmation: "confirmation"}


class Row(msgspec.Struct, frozen=True):
    """A record as it is exported, one JSON line each."""

    key: str
    task: str
    body: Body


class Records:
    """An open database.

    Attributes:
        moved_to: Where a damaged predecessor was set aside; `None` when there was none.
        rescued: Rows read from it.
    """

    def __init__(self, path: Path) -> None:
        """Open or create the database at `path`.

        Raises:
            RecordsError: The place cannot be written, or a newer version of this program wrote the file.
        """
        self.path = path
        self.moved_to: Path | None = None
        self.rescued = 0
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            msg = f"{path.parent}: cannot hold the records database ({error.strerror}); choose another with --records"
            raise RecordsError(msg) from error
        try:
            self.connection = _connect(path)
        except sqlite3.OperationalError as error:
            msg = f"{path}: cannot open the records database ({error}); choose another with --records"
            raise RecordsError(msg) from error
        except sqlite3.DatabaseError:
            self.moved_to = _set_aside(path)
            self.connection = _connect(path)
            self.rescued = self.merge(_salvage(self.moved_to))
            logger.warning("records database was damaged; set aside as %s, %d rows kept", self.moved_to, self.rescued)

    def close(self) -> None:
        """Close the database; it can be read again by anyone."""
        self.connection.close()

    def add(self, key: str, task: str, body: Body) -> None:
        """Write one fact and commit it.

        Raises:
            RecordsError: The disk is full, or another tuner holds the database for a minute.
        """
        self.merge([Row(key, task, body)])

    def merge(self, rows: Iterable[Row]) -> int:
        """Add the rows that are not here yet; returns how many were new."""
        try:
            with self.connection:
                return sum(self._insert(row) for row in rows)
        except sqlite3.Error as error:
            msg = f"{self.path}: cannot write the records ({error}); free space or choose another with --records"
            raise RecordsError(msg) from error

    def timing(self, key: str, rung: int) -> Timing | None:
        """Return the latest timing for a measurement key at a rung of the race."""
        found: Timing | None = None
        for body in self._select("key = ? and kind = 'timing'", key):
            if isinstance(body, Timing) and body.rung == rung:
                found = body
        return found

    def refusal(self, key: str) -> Rejected | None:
        """Return why a measurement key is out, if it is."""
        for body in self._select("key = ? and kind = 'refusal'", key):
            if isinstance(body, Refusal):
                return body.rejected
        return None

    def outcome(self, key: str) -> Outcome | None:
        """Return the latest finished race for a race key."""
        found: Outcome | None = None
        for body in self._select("key = ? and kind = 'outcome'", key):
            if isinstance(body, Outcome):
                found = body
        return found

    def confirmation(self, key: str) -> Confirmation | None:
        """Return the latest confirmation for a confirmation key."""
        found: Confirmation | None = None
        for body in self._select("key = ? and kind = 'confirmation'", key):
            if isinstance(body, Confirmation):
                found = body
        return found

    def of_keys(self, task: str, keys: frozenset[str]) -> tuple[Body, ...]:
        """Return a task's rows for these measurement keys, in the order they were written."""
        rows = self.connection.execute("select key, body from records where task = ? order by id", (task,))
        return tuple(_decode(body) for key, body in rows if key in keys)

    def export(self) -> Iterator[bytes]:
        """Yield every row as a line of JSON, in the order written."""
        for key, task, body in self.connection.execute("select key, task, body from records order by id"):
            yield msgspec.json.encode(Row(key, task, _decode(body)), order="deterministic") + b"\n"

    def _insert(self, row: Row) -> int:
        body = msgspec.json.encode(row.body, order="deterministic").decode()
        kind = _KINDS[type(row.body)]
        digest = hashlib.sha256(f"{row.key} {row.task} {body}".encode()).hexdigest()
        statement = "insert or ignore into records (key, kind, task, body, digest) values (?, ?, ?, ?, ?)"
        return self.connection.execute(statement, (row.key, kind, row.task, body, digest)).rowcount

    def _select(self, where: str, *values: str) -> list[Body]:
        rows = self.connection.execute(f"select body from records where {where} order by id", values)  # noqa: S608 (constant texts)
        return [_decode(body) for (body,) in rows]


def parse_rows(lines: Iterable[bytes]) -> Iterator[Row]:
    """Read what `Records.export` wrote.

    Raises:
        RecordsError: A line is no record.
    """
    for number, line in enumerate(lines, start=1):
        try:
            yield msgspec.json.decode(line, type=Row)
        except msgspec.MsgspecError as error:
            msg = f"line {number} is no record: {error}"
            raise RecordsError(msg) from error


def _decode(body: str) -> Body:
    return msgspec.json.decode(body, type=Body)


def _connect(path: Path) -> sqlite3.Connection:
    """Open, retrying while another process switches the new file to write-ahead logging (no busy handler runs then)."""
    deadline = time.monotonic() + _BUSY_TIMEOUT_S
    while True:
        try:
            return _open(path)
        except sqlite3.OperationalError as error:
            if "locked" not in str(error) or time.monotonic() > deadline:
                raise
            time.sleep(0.05)


def _open(path: Path) -> sqlite3.Connection:
    connection = sqlite3.connect(path, timeout=_BUSY_TIMEOUT_S)
    try:
        connection.execute("pragma journal_mode = wal")
        connection.execute("pragma synchronous = normal")
        (version,) = connection.execute("pragma user_version").fetchone()
        if version > SCHEMA_VERSION:
            msg = f"{path}: has schema {version}, expected at most {SCHEMA_VERSION}: update, or give other --records"
            raise RecordsError(msg)
        if connection.execute("pragma quick_check(1)").fetchone() != ("ok",):
            raise sqlite3.DatabaseError("quick_check failed")
        with connection:
            connection.executescript(_TABLES)
            connection.execute(f"pragma user_version = {SCHEMA_VERSION}")
    except BaseException:
        connection.close()
        raise
    return connection


def _set_aside(path: Path) -> Path:
    number = 1
    while (moved := path.with_name(f"{path.name}.damaged-{number}")).exists():
        number += 1
    for suffix in ("-wal", "-shm"):
        beside = path.with_name(path.name + suffix)
        if beside.exists():
            beside.replace(moved.with_name(moved.name + suffix))
    path.replace(moved)
    return moved


def _salvage(path: Path) -> Iterator[Row]:
    """Read what can be read of a damaged database."""
    try:
        connection = sqlite3.connect(path)
    except sqlite3.Error:
        return
    try:
        (last,) = connection.execute("select max(id) from records").fetchone()
    except sqlite3.Error:
        connection.close()
        return
    for number in range(1, (last or 0) + 1):
        try:
            found = connection.execute("select key, task, body from records where id = ?", (number,)).fetchone()
            if found is not None:
                yield Row(found[0], found[1], _decode(found[2]))
        except (sqlite3.Error, msgspec.MsgspecError, TypeError):
            continue
    connection.close()
