"""Complete races as a device and families: what a search would ask for comes from the real families' own lists.

A race is a `recorded_gpu.Recording` of every configuration at `thorough`. Families offer what the real ones offer
today, as far as it was recorded; builds are empty but for the layout that they want the weight in.
"""

import hashlib
from collections.abc import Iterator, Mapping
from random import Random

from bench.races import Raced, Times
from recorded_gpu import Recording

from tune_model.extract.task import Task, task_key
from tune_model.runtime.kernel import CpuLaunch, Kernel
from tune_model.tune.candidate import ALL_KINDS, Built, Candidate, Config, Effort, Rejected
from tune_model.tune.device import Bench, Passed, Samples
from tune_model.tune.families import family_named
from tune_model.tune.measuring.policy import Rung
from tune_model.tune.search.order import thin
from tune_model.tune.target import Target

ON_THE_GPU_ALONE = frozenset({"cublaslt"})
"""Families that list their configurations with the device itself: the recorded order is theirs."""


class ReplayedFamily:
    """A family that offers what the real one does, of what was recorded."""

    version = 1
    kinds = ALL_KINDS

    def __init__(self, name: str, races: Mapping[str, Recording]) -> None:
        self.name = name
        self.races = races

    def __getstate__(self) -> dict[str, object]:
        return {"name": self.name, "races": {}}

    def _recorded(self, task: Task) -> list[Config]:
        race = self.races[task_key(task)]
        return [candidate.config for candidate in race.raced() if candidate.family == self.name]

    def accepts(self, task: Task, target: Target) -> Rejected | None:
        return None if self._recorded(task) else Rejected("unsupported", "not recorded")

    def start(self, task: Task, target: Target) -> Config:
        return next(self.configurations(task, target, Effort.QUICK))

    def configurations(self, task: Task, target: Target, effort: Effort) -> Iterator[Config]:
        recorded = self._recorded(task)
        if self.name in ON_THE_GPU_ALONE:
            yield from thin(recorded, effort, 0.4)
            return
        known = set(recorded)
        yield from (c for c in family_named(self.name).configurations(task, target, effort) if c in known)

    def build(self, task: Task, config: Config, target: Target) -> Built | Rejected:
        turned = self.name == "aten_transposed" or dict(config).get("layout") == "transposed"
        code = repr((self.name, config)).encode()
        digest = hashlib.sha256(code).hexdigest()
        layouts = (("a1", "transposed"),) if turned else ()
        return Built(Kernel((CpuLaunch(digest, "run", ("a0", "a1", "t0")),), layouts=layouts), {digest: code})


class ReplayedGpu:
    """A `Device` that answers with recorded times, noise of their own spread, and a drift as of clocks.

    Attributes:
        asked: Distinct candidates that were timed, by task.
    """

    def __init__(self, races: Mapping[str, Recording], seed: int = 0, drift: float = 0.005) -> None:
        self.races = races
        self.noise = Random(seed)  # noqa: S311 (repeatable noise)
        self.drift = drift
        self.asked: dict[str, set[Candidate]] = {}
        self.task = ""
        self.raced: dict[Candidate, Raced] = {}

    def open(self, bench: Bench) -> Passed | Rejected:
        self.task = task_key(bench.task)
        self.raced = self.races[self.task].raced()
        return Passed(0.0)

    def check(self, candidate: Candidate, built: Built) -> Passed | Rejected:
        refused = self.raced[candidate].refused
        return Rejected(refused, "as recorded") if refused else Passed(0.0)

    def time(self, candidate: Candidate, built: Built, rung: Rung) -> Samples | Rejected:
        self.asked.setdefault(self.task, set()).add(candidate)
        clocks = self.noise.lognormvariate(0.0, self.drift)
        return self._draw(self.raced[candidate], rung.samples, clocks)

    def compare(self, candidates: tuple[tuple[Candidate, Built], ...], rung: Rung) -> tuple[Samples | Rejected, ...]:
        return tuple(self._draw(self.raced[candidate], rung.samples, 1.0) for candidate, _ in candidates)

    def finish(self) -> None:
        self.raced = {}

    def close(self) -> None:
        self.finish()

    def _draw(self, raced: Raced, count: int, clocks: float) -> Samples:
        median, low, high = times_of(raced)
        spread = (high - low) / 1.68
        return Samples(tuple(clocks * max(0.1, median + self.noise.gauss(0.0, spread)) for _ in range(count)))


def times_of(raced: Raced) -> Times:
    """A configuration's times as well as they are known."""
    return raced.final or raced.race[-1]
