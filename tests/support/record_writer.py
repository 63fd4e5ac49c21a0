"""A writer of records for tests with several processes: in a module of its own, so that a spawned one can import it."""

from pathlib import Path

from tune_model.tune.candidate import Candidate
from tune_model.tune.records.database import Records, Timing


def timing(us: float, rung: int = 0, name: str = "gemv") -> Timing:
    return Timing(Candidate(name, (("block", 64), ("hint", "first"))), rung, "race", us, us, us, 3, 0.001)


def write_many(path: Path, start: int, count: int = 50, told: Path | None = None) -> None:
    """Add rows with keys from `start`; with `told`, note there which are in."""
    records = Records(path)
    for number in range(start, start + count):
        records.add(f"k{number}", "task", timing(float(number)))
        if told is not None:
            with told.open("a", encoding="ascii") as file:
                file.write(f"k{number}\n")
    records.close()


def count_rescued(path: Path, told: Path) -> None:
    """Open a damaged database and note how many rows were rescued by this process."""
    records = Records(path)
    told.write_text(str(records.rescued if records.moved_to is not None else -1))
    records.close()
