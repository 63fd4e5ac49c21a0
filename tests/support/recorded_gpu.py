"""Llama-3-8B's tasks as an H200 timed them, as a device that answers from the recording.

`tests/data/llama-3-8b.h200.tuning.jsonl.gz`: first a line that names device, versions, date and units; then a line per
task with every configuration that was raced, its times at the rungs it reached, in the final if it got there, or why it
was refused.
"""

import gzip
from pathlib import Path
from random import Random

import msgspec
from bench.races import Header, Race, Raced, Times
from tuning_fakes import FakeFamily, linear_form, linear_plan

from tune_model.extract.task import Plan, PlannedTask, Task
from tune_model.tune.candidate import Built, Candidate, Config, Effort, Rejected
from tune_model.tune.device import Bench, Passed, Samples
from tune_model.tune.measuring.policy import Rung
from tune_model.tune.target import Target

PATH = Path(__file__).parents[1] / "data" / "llama-3-8b.h200.tuning.jsonl.gz"


class Recording(Race, frozen=True):
    """A task's race."""

    def raced(self) -> dict[Candidate, Raced]:
        """Return everything that was raced, the extern first."""
        return {
            Candidate(name, tuple(zip(space.parameters, found.values, strict=True))): found
            for name, space in self.families.items()
            for found in space.configurations
        }

    def best_us(self) -> dict[Candidate, float]:
        """Return each candidate's time as well as it is known: from the final, else its longest rung."""
        known = {c: found.final or found.race[-1] for c, found in self.raced().items() if not found.refused}
        return {c: times[0] for c, times in known.items()}


def read(path: Path = PATH) -> tuple[Header, list[Recording]]:
    """Read a recording: the model's, or the complete races that a benchmark left beside its result."""
    first, *rest = gzip.decompress(path.read_bytes()).splitlines()
    return msgspec.json.decode(first, type=Header), [msgspec.json.decode(line, type=Recording) for line in rest]


def plan_of(recordings: list[Recording]) -> Plan:
    """Return a plan of stand-in tasks: number `i` has `i + 1` rows, and the kind and weight of recording `i`."""
    tasks: list[PlannedTask] = []
    plan = linear_plan()
    for number, recording in enumerate(recordings):
        form = msgspec.structs.replace(linear_form(), kind=recording.kind)
        (task,) = linear_plan(number + 1, form=form).tasks
        tasks.append(msgspec.structs.replace(task, label=recording.label, weight=recording.weight))
    return msgspec.structs.replace(plan, tasks=tuple(tasks))


class RecordedFamily(FakeFamily):
    """A family whose configurations for a stand-in task are the recorded ones."""

    def __init__(self, name: str, recordings: list[Recording]) -> None:
        super().__init__(name, ((),))
        self.recordings = recordings

    def __getstate__(self) -> dict[str, object]:
        return {"name": self.name, "layout": "", "recordings": []}

    def _configs(self, task: Task) -> list[Config]:
        recording = self.recordings[_number(task)]
        return [c.config for c in recording.raced() if c.family == self.name]

    def accepts(self, task: Task, target: Target) -> Rejected | None:
        return None if self._configs(task) else Rejected("unsupported", "not recorded")

    def start(self, task: Task, target: Target) -> Config:
        return self._configs(task)[0]

    def configurations(self, task: Task, target: Target, effort: Effort):  # type: ignore[no-untyped-def]
        yield from self._configs(task)


class RecordedGpu:
    """A `Device` that answers with recorded times and their spread.

    Attributes:
        samples: How many were taken in all.
    """

    def __init__(self, recordings: list[Recording], seed: int = 0) -> None:
        self.recordings = recordings
        self.samples = 0
        self.noise = Random(seed)  # noqa: S311 (repeatable noise)
        self.raced: dict[Candidate, Raced] = {}

    def open(self, bench: Bench) -> Passed | Rejected:
        self.raced = self.recordings[_number(bench.task)].raced()
        return Passed(0.0)

    def check(self, candidate: Candidate, built: Built) -> Passed | Rejected:
        refused = self.raced[candidate].refused
        return Rejected(refused, "as recorded") if refused else Passed(0.0)

    def time(self, candidate: Candidate, built: Built, rung: Rung) -> Samples | Rejected:
        self.samples += rung.samples
        race = self.raced[candidate].race
        return self._draw(race[0] if rung.samples < 8 else race[-1], rung.samples)

    def compare(self, candidates: tuple[tuple[Candidate, Built], ...], rung: Rung) -> tuple[Samples | Rejected, ...]:
        self.samples += rung.samples * len(candidates)
        found = [self.raced[candidate] for candidate, _ in candidates]
        return tuple(self._draw(f.final or f.race[-1], rung.samples) for f in found)

    def finish(self) -> None:
        self.raced = {}

    def close(self) -> None:
        self.finish()

    def _draw(self, times: Times, count: int) -> Samples:
        median, low, high = times
        # 20th and 80th percentile lie 0.84 standard deviations from the median.
        return Samples(tuple(median + self.noise.gauss(0.0, (high - low) / 1.68) for _ in range(count)))


def families_of(recordings: list[Recording]) -> tuple[RecordedFamily, ...]:
    """Return a family for each name that was recorded, the extern first."""
    names = dict.fromkeys(name for recording in recordings for name in recording.families)
    return tuple(RecordedFamily(name, recordings) for name in names)


def _number(task: Task) -> int:
    (rows, _columns) = task.form.parameters[0].type.shape
    assert isinstance(rows, int)
    return rows - 1
