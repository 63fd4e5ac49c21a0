"""Complete races beside a result file: every configuration's time or why it was out, for replaying a search later.

One line of JSON a form, after a line that says where it was measured; the format of `tests/data/*.tuning.jsonl.gz`.
"""

import gzip
import zlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final

import msgspec

from bench.ledger import OtherMachineError
from tune_model.pipeline.bench.result import BenchmarkResult
from tune_model.runtime.errors import TuneModelError
from tune_model.runtime.program import FormKind
from tune_model.tune.candidate import Candidate
from tune_model.tune.measuring.interval import percentile
from tune_model.tune.records.database import Body, Refusal, Timing
from tune_model.tune.search.contest import Contest

__all__ = ["Header", "Race", "Raced", "Races", "Space", "Times", "races_path", "record_of"]

UNITS: Final = "microseconds per call: median, 20th and 80th percentile"

Times = tuple[float, float, float]


class Header(msgspec.Struct, frozen=True):
    """Where and how the races were run."""

    device: str
    versions: dict[str, str]
    date: str
    model: str
    policy: str
    units: str = UNITS


class Raced(msgspec.Struct, frozen=True, omit_defaults=True):
    """A configuration: its values, and its times or why it was out; `final` of those that met again."""

    values: tuple[Any, ...]
    race: tuple[Times, ...] = ()
    final: Times | None = None
    refused: str = ""


class Space(msgspec.Struct, frozen=True):
    """A family's configurations for a form."""

    parameters: tuple[str, ...]
    configurations: tuple[Raced, ...]


class Race(msgspec.Struct, frozen=True):
    """A form's race."""

    task: str
    label: str
    kind: FormKind
    weight: float
    families: dict[str, Space]


def races_path(result: Path) -> Path:
    """Return where the races of a result file are: `matmul.h200.json` has `matmul.h200.races.jsonl.gz` beside it."""
    return result.with_name(f"{result.name.removesuffix('.json')}.races.jsonl.gz")


class Races:
    """A file of races while it is being filled.

    Attributes:
        path: The file.
        races: As in the file, by name of their row.
    """

    def __init__(self, path: Path, head: BenchmarkResult, policy: str = "") -> None:
        """Open the file, or begin one.

        Raises:
            OtherMachineError: The file's races were run elsewhere.
        """
        self.path = path
        self.header = Header(head.device, head.versions, head.date, head.benchmark, policy)
        self.races: dict[str, Race] = {}
        if path.exists():
            self._read(path)

    def absorb(self, *paths: Path) -> None:
        """Add other files' races; they replace those of the same rows.

        Raises:
            OtherMachineError: They were run elsewhere.
            TuneModelError: A file holds no races. Nothing is saved then.
        """
        for path in paths:
            self._read(path)
        self._save()

    def put(self, name: str, race: Race) -> None:
        """Add a race, or put it in the place of its predecessor, and save the file."""
        self.races[name] = race
        self._save()

    def _read(self, path: Path) -> None:
        try:
            first, *rest = gzip.decompress(path.read_bytes()).splitlines()
            header = msgspec.json.decode(first, type=Header)
            races = [msgspec.json.decode(line, type=Race) for line in rest]
        except (ValueError, EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise TuneModelError(f"{path}: {error}; expected the races of a benchmark") from error
        seen, expected = (header.device, header.versions), (self.header.device, self.header.versions)
        if seen != expected:
            msg = f"{path}: races of {seen}; the others are of {expected}: give another --save"
            raise OtherMachineError(msg)
        self.header = msgspec.structs.replace(self.header, policy=header.policy or self.header.policy)
        self.races |= {race.label: race for race in races}

    def _save(self) -> None:
        lines = [self.header, *(self.races[name] for name in sorted(self.races))]
        text = b"".join(msgspec.json.encode(line) + b"\n" for line in lines)
        temporary = self.path.with_name(f"{self.path.name}.partial")
        self.path.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_bytes(gzip.compress(text, mtime=0))
        temporary.replace(self.path)


def record_of(name: str, contest: Contest, again: Mapping[Candidate, Iterable[float]]) -> Race:
    """Return a contest's race as its records hold it.

    Args:
        name: Of the row.
        contest: Raced to the end.
        again: Medians of those that met again, in microseconds, one for each time they met.
    """
    rows: dict[Candidate, Body] = {}
    for row in contest.rows():
        if isinstance(row, Refusal) or (isinstance(row, Timing) and row.candidate not in rows):
            rows[row.candidate] = row
    families: dict[str, list[tuple[Candidate, Raced]]] = {}
    for candidate in contest.candidates:
        found = rows.get(candidate)
        if found is not None:
            raced = _raced(candidate, found, tuple(again.get(candidate, ())))
            families.setdefault(candidate.family, []).append((candidate, raced))
    return Race(
        contest.planned.key,
        name,
        contest.planned.task.form.kind,
        1.0,
        {family: _space(found) for family, found in families.items()},
    )


def _raced(candidate: Candidate, found: Body, again: tuple[float, ...]) -> Raced:
    values = tuple(value for _, value in candidate.config)
    if isinstance(found, Refusal):
        return Raced(values, refused=found.rejected.reason)
    if not isinstance(found, Timing):
        raise TypeError(f"{found!r} is no outcome of a race")
    times = _short(found.median_us, found.low_us, found.high_us)
    final = _short(*(percentile(again, part) for part in (0.5, 0.2, 0.8))) if again else None
    return Raced(values, (times,), final)


def _short(*us: float) -> Times:
    median, low, high = (float(f"{value:.6g}") for value in us)
    return median, low, high


def _space(found: list[tuple[Candidate, Raced]]) -> Space:
    names = tuple(name for name, _ in found[0][0].config)
    return Space(names, tuple(raced for _, raced in found))
