"""What all shards share: the result file, the time, the tuner's folder; and failure that costs one row only."""

import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import islice
from typing import Any, NamedTuple, Protocol, TypeVar

import torch

from bench.ledger import Clock, Ledger
from bench.tuned import Shop

__all__ = ["Bench", "DeviceBrokenError", "TimeOverError", "attempt", "print_table"]


class _HasName(Protocol):
    @property
    def name(self) -> str: ...


Named = TypeVar("Named", bound=_HasName)


class TimeOverError(Exception):
    """A row could not be finished in the time there is; what it needs next time is in the records."""


class DeviceBrokenError(Exception):
    """The device answers no more; only a new process can go on."""


class Bench(NamedTuple):
    """One run of one or more shards.

    Attributes:
        ledger: The result file.
        clock: When to stop.
        shop: For tuning.
        tell: Prints a line.
        again: Measure rows that are in the file already.
        only: Parts of rows' names; empty for all.
        part: Place of the first row to measure, and the step to the next.
    """

    ledger: Ledger
    clock: Clock
    shop: Shop
    tell: Callable[[str], None]
    again: bool = False
    only: tuple[str, ...] = ()
    part: tuple[int, int] = (0, 1)

    def wants(self, shard: str, name: str) -> bool:
        """Say whether a row is to be measured now."""
        if self.only and not any(part in name for part in self.only):
            return False
        return self.again or self.ledger.row(shard, name) is None

    def missing(self, shard: str, rows: Iterable[Named]) -> list[Named]:
        """Return the rows to measure now; those that failed before come last, since they may take the device along."""
        failed = {row["row"] for row in self.ledger.rows if row["shard"] == shard and "failed" in row}
        first, step = self.part
        mine = islice(rows, first, None, step)
        return sorted((row for row in mine if self.wants(shard, row.name)), key=lambda row: row.name in failed)

    def finished(self, shard: str) -> list[dict[str, Any]]:
        """Return a shard's rows that did not fail."""
        return [row for row in self.ledger.rows if row["shard"] == shard and "failed" not in row]


def attempt(bench: Bench, shard: str, name: str, measure: Callable[[], Mapping[str, Any]]) -> dict[str, Any] | None:
    """Measure a row and save it; what goes wrong is saved as the row's failure, and the next row is measured.

    Raises:
        DeviceBrokenError: The failure took the device with it.
    """
    try:
        return bench.ledger.record(shard, name, measure())
    except TimeOverError:
        return None
    except Exception as error:  # noqa: BLE001 (a row that fails must not cost the others)
        where = traceback.extract_tb(error.__traceback__)[-1]
        text = f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"[:300]
        bench.tell(f"  {shard} {name} failed: {text} ({where.name}:{where.lineno})")
        bench.ledger.record(shard, name, {"failed": text})
    _require_device()
    return None


def _require_device() -> None:
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        try:
            torch.cuda.synchronize()
        except RuntimeError as error:
            raise DeviceBrokenError(str(error).splitlines()[0]) from error


def print_table(bench: Bench, title: str, head: Sequence[str], body: Sequence[Sequence[str]]) -> None:
    """Print a table, the last column flush left."""
    if not body:
        bench.tell(f"{title}: no rows yet")
        return
    widths = [max(len(line[i]) for line in (head, *body)) for i in range(len(head))]
    bench.tell(f"\n{title}")
    for line in (head, *body):
        cells = [cell.rjust(width) for cell, width in zip(line, widths, strict=True)]
        cells[0], cells[-1] = line[0].ljust(widths[0]), line[-1]
        bench.tell("  ".join(cells).rstrip())
