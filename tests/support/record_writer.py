"""A writer of records for tests with several processes: in a module of its own, so that a spawned one can import it."""

from pathlib import Path

from tune_model.tune.candidate import Candidate
from tune_model.tune.records import Records, Timing


def timing(us: float, rung: int = 0, name: str = "gemv") -> Timing:
    return Timing(Candidate(name, (("block", 64), ("hint", "first"))), rung, "race", us, us, us, 3, 0.001)


def write_many(path: Path, start: int) -> None:
    """Add 50 rows with keys from `start`."""
    records = Records(path)
    for number in range(start, start + 50):
        records.add(f"k{number}", "task", timing(float(number)))
    records.close()
