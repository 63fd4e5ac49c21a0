"""The result file while it is being filled: one row at a time, saved at once, found again by the next run."""

import functools
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec
import torch

from tune_model.pipeline.bench.result import (
    BenchmarkResult,
    device_name,
    library_versions,
    merge_commands,
    merge_rows,
    read_result,
    today,
    write_result,
)
from tune_model.runtime.errors import TuneModelError

__all__ = ["KEY", "Clock", "Ledger", "OtherMachineError", "head_here", "head_of", "rounded"]

KEY: Final = ("shard", "row")
"""What tells rows apart."""

Summarise = Callable[[list[dict[str, Any]]], dict[str, float]]


class OtherMachineError(TuneModelError):
    """The file holds results of another device or other library versions."""


class Clock:
    """A time budget."""

    def __init__(self, seconds: float | None, now: Callable[[], float] = time.monotonic) -> None:
        self.now = now
        self.started = now()
        self.end = None if seconds is None else self.started + seconds

    @property
    def spent_s(self) -> float:
        """Seconds since the start."""
        return self.now() - self.started

    @property
    def left_s(self) -> float | None:
        """Seconds left; `None` for no limit."""
        return None if self.end is None else max(0.0, self.end - self.now())

    @property
    def is_over(self) -> bool:
        """The budget is spent."""
        return self.end is not None and self.now() >= self.end


def head_here(benchmark: str, device: torch.device, command: str) -> BenchmarkResult:
    """Return the head of a file of rows that are measured now, on this machine."""
    return BenchmarkResult(benchmark, device_name(device), library_versions(), today(), command, [], {})


def head_of(paths: Sequence[Path], benchmark: str) -> BenchmarkResult:
    """Return the first file's head with all commands and the latest day, so that rows come together on any machine.

    Raises:
        OtherMachineError: They were measured on different machines.
        TuneModelError: A file is no result of this benchmark.
    """
    head = read_result(paths[0])
    if head.benchmark != benchmark:
        raise TuneModelError(f"{paths[0]}: $.benchmark is {head.benchmark!r}; expected a result of {benchmark!r}")
    results = [_read_beside(path, head) for path in paths]
    command = functools.reduce(merge_commands, (result.command for result in results))
    date = max(result.date for result in results)
    return msgspec.structs.replace(head, date=date, command=command, rows=[], summary={})


def _read_beside(path: Path, head: BenchmarkResult) -> BenchmarkResult:
    """Read a file whose rows belong into one table with others'."""
    found = read_result(path)
    for field in ("benchmark", "device", "versions"):
        seen, expected = getattr(found, field), getattr(head, field)
        if seen != expected:
            msg = f"{path}: $.{field} is {seen}; the other rows are of {expected}: give another --save"
            raise OtherMachineError(msg)
    return found


class Ledger:
    """Rows of one benchmark on one device.

    Attributes:
        path: The file.
        rows: As in the file.
    """

    def __init__(self, path: Path, head: BenchmarkResult, summarise: Summarise) -> None:
        """Open the file, or begin one.

        Args:
            path: The file.
            head: Where its rows are from; it has none itself.
            summarise: Makes the flat figures of the rows.

        Raises:
            OtherMachineError: The file's rows were measured elsewhere; they do not belong into one table.
            TuneModelError: The file is no benchmark result.
        """
        self.path = path
        self.summarise = summarise
        self.head = head
        self.rows: list[dict[str, Any]] = []
        if path.exists():
            self.rows = _read_beside(path, head).rows

    def absorb(self, *paths: Path) -> None:
        """Add other files' rows, measured on equal machines; they replace equal ones, but failures nothing measured.

        Raises:
            OtherMachineError: They were measured elsewhere.
            TuneModelError: A file is no benchmark result. Nothing is saved then.
        """
        rows = self.rows
        for path in paths:
            measured = {_name(row) for row in rows if "failed" not in row}
            new = _read_beside(path, self.head).rows
            rows = merge_rows(rows, [row for row in new if "failed" not in row or _name(row) not in measured], KEY)
        self.rows = rows
        self.save()

    def row(self, shard: str, name: str) -> dict[str, Any] | None:
        """Return a row that is there and did not fail."""
        for row in self.rows:
            if (row["shard"], row["row"]) == (shard, name) and "failed" not in row:
                return row
        return None

    def record(self, shard: str, name: str, values: Mapping[str, Any]) -> dict[str, Any]:
        """Put a row in the place of its predecessor and save the file."""
        row = {"shard": shard, "row": name, **{key: rounded(value) for key, value in values.items()}}
        self.rows = merge_rows(self.rows, [row], KEY)
        self.save()
        return row

    def save(self) -> None:
        """Write the file, its summary made of the rows there are."""
        write_result(self.path, msgspec.structs.replace(self.head, rows=self.rows, summary=self.summary))

    @property
    def summary(self) -> dict[str, float]:
        """What the rows come to."""
        return {key: rounded(value) for key, value in self.summarise(self.rows).items()}


def _name(row: Mapping[str, Any]) -> tuple[Any, ...]:
    return tuple(row.get(key) for key in KEY)


def rounded(value: Any) -> Any:
    """Keep six digits: more of a time is noise, and the file is read by people."""
    return float(f"{value:.6g}") if isinstance(value, float) else value
