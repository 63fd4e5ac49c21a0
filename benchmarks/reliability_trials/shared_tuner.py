"""One of the tuners of `sharing`: `python shared_tuner.py FOLDER NUMBER NOTES`. Its device makes its times up."""

import sys
from collections.abc import Iterator
from pathlib import Path
from random import Random

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tune_model.extract.task import Task
from tune_model.runtime.kernel import Kernel
from tune_model.runtime.program import FormKind
from tune_model.tune.candidate import ALL_KINDS, Built, Candidate, Config, Effort, Rejected
from tune_model.tune.device import Bench, Passed, Samples
from tune_model.tune.measuring.policy import Rung
from tune_model.tune.records.database import Records
from tune_model.tune.target import CpuTarget, Target

TARGET = CpuTarget("x86_64", ("avx2",), "A CPU that answers at once", 1, 1 << 20, 1 << 25, "g++ 12", "2.13")


class Same:
    """Every configuration is the plain operators, so that nothing is compiled."""

    version = 1
    kinds: frozenset[FormKind] = ALL_KINDS

    def __init__(self, name: str, count: int) -> None:
        self.name = name
        self.count = count

    def accepts(self, task: Task, target: Target) -> Rejected | None:
        """Accept everything."""
        return None

    def start(self, task: Task, target: Target) -> Config:
        """Return the first."""
        return (("number", 0),)

    def configurations(self, task: Task, target: Target, effort: Effort) -> Iterator[Config]:
        """Yield them all."""
        yield from ((("number", number),) for number in range(self.count))

    def build(self, task: Task, config: Config, target: Target) -> Built | Rejected:
        """State the body."""
        return Built(Kernel(task.form.body), {})


class MadeUp:
    """Times from a dice."""

    def __init__(self, seed: str) -> None:
        self.dice = Random(seed)  # noqa: S311 (times of no meaning)

    def open(self, bench: Bench) -> Passed | Rejected:
        """Open anything."""
        return Passed(0.0)

    def check(self, candidate: Candidate, built: Built) -> Passed | Rejected:
        """Find anything right."""
        return Passed(0.0)

    def time(self, candidate: Candidate, built: Built, rung: Rung) -> Samples | Rejected:
        """Make a time up."""
        return Samples(tuple(self.dice.uniform(5.0, 10.0) for _ in range(rung.samples)))

    def compare(self, candidates: tuple[tuple[Candidate, Built], ...], rung: Rung) -> tuple[Samples | Rejected, ...]:
        """Make times up."""
        return tuple(Samples(tuple(self.dice.uniform(5.0, 10.0) for _ in range(rung.samples))) for _ in candidates)

    def finish(self) -> None:
        """Nothing is held."""

    def close(self) -> None:
        """Nothing is held."""


class Noting(Records):
    """Records that note elsewhere what they hold, once they do."""

    def __init__(self, path: Path, notes: Path) -> None:
        super().__init__(path)
        self.notes = notes.open("a", encoding="ascii")

    def add(self, key: str, task: str, body: object) -> None:
        """Write a fact, then note its key."""
        super().add(key, task, body)  # type: ignore[arg-type]
        self.notes.write(f"{key}\n")
        self.notes.flush()


def main(folder: Path, number: int, notes: Path) -> None:
    """Tune; tuners share half of their tasks with the next."""
    from bench.plans import plan_of

    from reliability_trials.forms import linear
    from tune_model.tune.options import TuneOptions
    from tune_model.tune.tuner import tune_with
    from tune_model.tune.workshop import Workshop

    plan = plan_of([linear(1 + number * 6 + rows, 16, 32) for rows in range(12)])
    options = TuneOptions(folder / "records.sqlite", folder / "kernels")
    shop = Workshop(
        (Same("aten", 1), Same("same", 30)), TARGET, MadeUp(f"tuner {number}"), options, lambda _event: None
    )
    shop.records.close()
    shop.records = Noting(options.records_path, notes)
    tune_with(plan, shop)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
