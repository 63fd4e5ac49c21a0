"""Every measurement, rejection and outcome, in one SQLite database that all models and all tuners share.

One row per fact, committed before the next measurement starts, so a killed tuner loses at most the candidate in flight.
A row holds no time of day, path or host name. What a row says is never changed; of several for one key the last counts,
and a fact that is found again becomes the last one. Locks are the kernel's and end with their owner. A damaged file is
set aside and rebuilt from the rows that can still be believed.
"""

import logging
import os
import sqlite3
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final

import msgspec

from tune_model.runtime.errors import TuneModelError
from tune_model.tune.candidate import TRANSIENT_REASONS, Rejected
from tune_model.tune.records.facts import KINDS, Body, Confirmation, Finalist, Outcome, Refusal, Row, StepTiming, Timing
from tune_model.tune.records.salvage import row_digest, salvage
from tune_model.tune.records.storage import exclusive, network_file_system

__all__ = [
    "Body",
    "Confirmation",
    "Finalist",
    "Outcome",
    "Records",
    "RecordsError",
    "Refusal",
    "Row",
    "Timing",
    "parse_rows",
]

logger = logging.getLogger(__name__)

SCHEMA_VERSION: Final = 3
"""2 added confirmations, 3 times of whole steps; a database of an older version is read and written on."""

_AGAIN: Final = "on conflict (digest) do update set id = (select max(id) + 1 from records)"
_KEEP: Final = "on conflict (digest) do nothing"
"""What becomes of a fact that is there already."""

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


class Records:
    """An open database.

    Attributes:
        moved_to: Where a damaged predecessor was set aside; `None` when there was none.
        rescued: Rows read from it.
    """

    def __init__(self, path: Path, *, copy_of: Path | None = None) -> None:
        """Open or create the database at `path`.

        Args:
            path: Where it is.
            copy_of: The file that `path` is a passing copy of, which messages name instead.

        Raises:
            RecordsError: The place cannot be written, or a newer version of this program wrote the file.
        """
        self.path = path
        self._copy_of = copy_of
        self.moved_to: Path | None = None
        self.rescued = 0
        self._has_warned = False
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            msg = f"{path.parent}: cannot hold the records database ({error.strerror}); choose another with --records"
            raise RecordsError(msg) from error
        self._open()

    def close(self) -> None:
        """Close the database; it can be read again by anyone."""
        self.connection.close()

    def add(self, key: str, task: str, body: Body) -> None:
        """Write one fact and commit it; one that is there already moves behind everything written since.

        It outlives this process at once; what ends a race is flushed to the disk as well, so a power failure costs the
        race in flight at most.

        Raises:
            RecordsError: The disk is full, or another tuner holds the database for a minute.
        """
        self._follow()
        self._write([Row(key, task, body)], _AGAIN, flush=isinstance(body, Outcome | Confirmation | StepTiming))

    def merge(self, rows: Iterable[Row]) -> int:
        """Add the rows that are not here yet; returns how many were new.

        Those that are here keep their place: nothing tells whether the others' order or this one's is the newer.
        """
        return self._write(rows, _KEEP, flush=True)

    def timing(self, key: str, rung: int) -> Timing | None:
        """Return the latest timing for a measurement key at a rung of the race."""
        found: Timing | None = None
        for body in self._bodies(key, "timing"):
            if isinstance(body, Timing) and body.rung == rung:
                found = body
        return found

    def refusal(self, key: str) -> Rejected | None:
        """Return why a measurement key is out, if it is.

        It is not when it was timed after it was refused, nor for a reason that may pass (`TRANSIENT_REASONS`).
        """
        found: Rejected | None = None
        for row in self._rows("where key = ?", key):
            if isinstance(row.body, Refusal):
                found = row.body.rejected
            elif isinstance(row.body, Timing):
                found = None
        return None if found is None or found.reason in TRANSIENT_REASONS else found

    def outcome(self, key: str) -> Outcome | None:
        """Return the latest finished race for a race key."""
        found: Outcome | None = None
        for body in self._bodies(key, "outcome"):
            if isinstance(body, Outcome):
                found = body
        return found

    def confirmation(self, key: str) -> Confirmation | None:
        """Return the latest confirmation for a confirmation key."""
        found: Confirmation | None = None
        for body in self._bodies(key, "confirmation"):
            if isinstance(body, Confirmation):
                found = body
        return found

    def step(self, key: str) -> StepTiming | None:
        """Return the latest times of a whole step for a step key."""
        found: StepTiming | None = None
        for body in self._bodies(key, "step"):
            if isinstance(body, StepTiming):
                found = body
        return found

    def of_keys(self, task: str, keys: frozenset[str]) -> tuple[Body, ...]:
        """Return a task's rows for these measurement keys, in the order they were written."""
        return tuple(row.body for row in self._rows("where task = ?", task) if row.key in keys)

    def export(self) -> Iterator[bytes]:
        """Yield every row as a line of JSON, in the order written."""
        for row in self.rows():
            yield msgspec.json.encode(row, order="deterministic") + b"\n"

    def rows(self) -> Iterator[Row]:
        """Yield every sound row, in the order written."""
        return self._rows("")

    def numbers(self) -> dict[int, Row | None]:
        """Return every row by its number, in the order written; `None` for one that was changed on the disk.

        Raises:
            RecordsError: The file cannot be read.
        """
        statement = "select id, key, task, body, digest from records order by id"
        found: dict[int, Row | None] = {}
        try:
            for number, key, task, body, digest in self.connection.execute(statement):
                sound = digest == row_digest(key, task, body)
                found[number] = Row(key, task, msgspec.json.decode(body, type=Body)) if sound else None
        except (sqlite3.Error, msgspec.MsgspecError) as error:
            msg = f"{self.path}: the records cannot be read ({error}); run again to have them set aside and rebuilt"
            raise RecordsError(msg) from error
        return found

    def remove(self, numbers: Iterable[int]) -> int:
        """Remove rows for good and give their space back; returns how many there were.

        Raises:
            RecordsError: Another tuner holds the database for a minute, or there is no space to work in.
        """
        try:
            with self.connection:
                cursor = self.connection.executemany("delete from records where id = ?", ((n,) for n in numbers))
            self.connection.execute("vacuum")
            self.connection.execute("pragma wal_checkpoint(truncate)")
            return max(cursor.rowcount, 0)
        except sqlite3.Error as error:
            msg = f"{self.path}: rows cannot be removed ({error}); run it again when no tuner is at work"
            raise RecordsError(msg) from error

    def _bodies(self, key: str, kind: str) -> list[Body]:
        return [row.body for row in self._rows("where key = ? and kind = ?", key, kind)]

    def _rows(self, where: str, *values: str) -> Iterator[Row]:
        """Yield rows whose hash is right; one that was changed on the disk is as good as none."""
        statement = f"select key, task, body, digest from records {where} order by id"  # noqa: S608 (constant texts)
        try:
            for key, task, body, digest in self.connection.execute(statement, values):
                if digest == row_digest(key, task, body):
                    yield Row(key, task, msgspec.json.decode(body, type=Body))
                elif not self._has_warned:
                    self._has_warned = True
                    shown = self._copy_of or self.path
                    logger.warning("%s: rows are damaged and left out, the one for %s among them", shown, key)
        except (sqlite3.Error, msgspec.MsgspecError) as error:
            msg = f"{self.path}: the records cannot be read ({error}); run again to have them set aside and rebuilt"
            raise RecordsError(msg) from error

    def _write(self, rows: Iterable[Row], if_known: str, *, flush: bool) -> int:
        try:
            self.connection.execute(f"pragma synchronous = {'full' if flush else 'normal'}")
            with self.connection:
                return sum(self._insert(row, if_known) for row in rows)
        except sqlite3.Error as error:
            msg = f"{self.path}: cannot write the records ({error}); free space or choose another with --records"
            raise RecordsError(msg) from error

    def _insert(self, row: Row, if_known: str = _KEEP) -> int:
        body = msgspec.json.encode(row.body, order="deterministic").decode()
        kind = KINDS[type(row.body)]
        digest = row_digest(row.key, row.task, body)
        statement = f"insert into records (key, kind, task, body, digest) values (?, ?, ?, ?, ?) {if_known}"  # noqa: S608
        return self.connection.execute(statement, (row.key, kind, row.task, body, digest)).rowcount

    def _open(self) -> None:
        """Connect; a damaged file is set aside first, by one of the tuners that find it, and what it holds kept."""
        try:
            self.connection = _connect(self.path)
        except _DamagedError:
            try:
                with exclusive(self.path.with_name(f"{self.path.name}.lock")):
                    self._repair()
            except OSError as error:
                msg = f"{self.path}: is damaged and cannot be set aside ({error.strerror}); choose other --records"
                raise RecordsError(msg) from error
        facts = self.path.stat()
        self._file = (facts.st_dev, facts.st_ino)

    def _repair(self) -> None:
        try:
            self.connection = _connect(self.path)  # another tuner was faster
        except _DamagedError as error:
            self.moved_to = _set_aside(self.path)
            self.connection = _connect(self.path)
            self.rescued = self.merge(_salvaged(self.moved_to))
            if self._copy_of is not None:
                logger.warning("%s is damaged (%s): %d rows can be read", self._copy_of, error, self.rescued)
                return
            logger.warning(
                "%s was damaged (%s): set aside as %s, %d rows kept", self.path, error, self.moved_to, self.rescued
            )

    def _follow(self) -> None:
        """Go on in the file that is at the path now: another tuner may have set the old one aside, or it is gone."""
        try:
            facts = self.path.stat()
        except OSError:
            facts = None
        if facts is None or (facts.st_dev, facts.st_ino) != self._file:
            self.connection.close()
            self._open()


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


class _DamagedError(Exception):
    """The file is there and may be read and written, but it is no sound database."""


def _connect(path: Path) -> sqlite3.Connection:
    """Open, retrying while another process switches the new file to write-ahead logging (no busy handler runs then).

    Raises:
        RecordsError: The place cannot be used.
        _DamagedError: What is there is no database, or a damaged one.
    """
    deadline = time.monotonic() + _BUSY_TIMEOUT_S
    while True:
        try:
            return _set_up(path)
        except sqlite3.OperationalError as error:
            if "locked" in str(error) and time.monotonic() < deadline:
                time.sleep(0.05)
                continue
            if _is_about_content(error, path):
                raise _DamagedError(str(error)) from error
            msg = f"{path}: cannot open the records database ({error}); choose another with --records"
            raise RecordsError(msg) from error
        except sqlite3.DatabaseError as error:
            raise _DamagedError(str(error)) from error


def _is_about_content(error: sqlite3.OperationalError, path: Path) -> bool:
    """Tell a header that asks for what no version of SQLite has from a place that cannot be used."""
    signs = ("unsupported file format", "readonly database", "no such", "has no column", "Could not decode")
    return any(sign in str(error) for sign in signs) and path.is_file() and os.access(path, os.R_OK | os.W_OK)


def _set_up(path: Path) -> sqlite3.Connection:
    connection = sqlite3.connect(path, timeout=_BUSY_TIMEOUT_S)
    # What is no UTF-8 any more fails its hash, and so is left out.
    connection.text_factory = lambda raw: raw.decode(errors="replace")
    try:
        # The write-ahead log needs memory that all who use it share; over a network only the old journal is safe.
        connection.execute(f"pragma journal_mode = {'delete' if network_file_system(path) else 'wal'}")
        (version,) = connection.execute("pragma user_version").fetchone()
        if version > SCHEMA_VERSION:
            msg = f"{path}: has schema {version}, expected at most {SCHEMA_VERSION}: update, or give other --records"
            raise RecordsError(msg)
        if connection.execute("pragma quick_check(1)").fetchone() != ("ok",):
            raise sqlite3.DatabaseError("quick_check failed")
        with connection:
            connection.executescript(_TABLES)
            connection.execute(f"pragma user_version = {SCHEMA_VERSION}")
        connection.execute("select key, kind, task, body, digest from records limit 1").fetchone()
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


def _salvaged(path: Path) -> Iterator[Row]:
    """Read what can be read of a damaged database."""
    for found in salvage(path):
        try:
            yield Row(found.key, found.task, msgspec.json.decode(found.body, type=Body))
        except msgspec.MsgspecError:  # written by a version that knew other kinds
            continue
