"""Whole programs at the points of their grids, timed with several sets of kernels: from the records, or now.

What is asked of them is in `whole_program` (do the choices help the step?) and in `launch_forms` (how should they
start?). Times are recorded like those of races, so a second run measures nothing.
"""

import logging
import math
from collections.abc import Mapping, Sequence
from typing import Final, Literal, NamedTuple

from tune_model.extract.task import Plan, PlannedTask
from tune_model.runtime.execution.invoke import torch_dtype
from tune_model.runtime.kernel import Kernel
from tune_model.runtime.program import Program, fingerprint
from tune_model.runtime.replay import Entry
from tune_model.tune.building.source import digest_measuring
from tune_model.tune.candidate import Built, Candidate, Rejected, label
from tune_model.tune.device import Samples
from tune_model.tune.measuring.interval import chance_of_fewer, paired_ratio, percentile
from tune_model.tune.measuring.step_bench import StepTimer, Variant, Work
from tune_model.tune.records.facts import StepTiming
from tune_model.tune.records.identity import step_key
from tune_model.tune.search.contest import Contest
from tune_model.tune.search.guard import OTHER_INPUTS
from tune_model.tune.search.race import MUST_GAIN
from tune_model.tune.target import CudaTarget
from tune_model.tune.workshop import AbandonedRaceError, InterruptedRaceError, Workshop

__all__ = ["HARMS", "Look", "Picks", "Place", "Point", "Side", "Steps", "places_of"]

HARMS: Final = 1.0 / MUST_GAIN
"""A step's gain below which a choice harms it: what is not enough to win by is not enough to be given up for."""

_MEMORY_PART: Final = 0.4
"""Of the device's memory that a model's weights may take: they are there twice, plain and re-laid."""

_CPU_BYTES: Final = 4 << 30

_AT_ONCE: Final = 8
"""Sets of kernels that are timed in the same rounds: on a GPU each has a graph, with memory of its own."""

_REPEATS: Final = 3
"""Of times that something disturbs, as in races."""

Look = Literal["first", "second", "single", "together"]
"""Which question is asked (`whole_program`, `launch_forms`); a second look is in a fresh process, with other inputs."""

Point = tuple[tuple[str, int], ...]
Picks = Mapping[str, Candidate]

logger = logging.getLogger(__name__)


class Place(NamedTuple):
    """A program at a point of its grid, and the tasks that run there."""

    program: Program
    point: Point
    tasks: Mapping[tuple[str, tuple[int, ...]], PlannedTask]
    occurrences: Mapping[str, int]

    def __str__(self) -> str:
        return " ".join([self.program.name, *(f"{name}={value}" for name, value in self.point)])


Side = tuple[Place, Picks]


def places_of(plan: Plan) -> list[Place]:
    """Return every program at every point, in the plan's order."""
    tasks: dict[tuple[str, Point], dict[tuple[str, tuple[int, ...]], PlannedTask]] = {}
    counts: dict[tuple[str, Point], dict[str, int]] = {}
    for task in plan.tasks:
        for site in task.sites:
            if site.occurrences == 0:
                continue
            where = (site.program, site.point)
            tasks.setdefault(where, {})[site.form, site.dims] = task
            by_task = counts.setdefault(where, {})
            by_task[task.key] = by_task.get(task.key, 0) + site.occurrences
    programs = {program.name: program for program in plan.programs}
    return [Place(programs[name], point, tasks[name, point], counts[name, point]) for name, point in sorted(tasks)]


class Steps:
    """Times steps with sets of kernels.

    Attributes:
        contests: Races by task, whose candidates may be used.
        cut_short: Something was not timed because the run had to stop.
    """

    def __init__(self, shop: Workshop, timer: StepTimer) -> None:
        self.contests: dict[str, Contest] = {}
        self.cut_short = False
        self._shop = shop
        self._timer = timer
        self._built: dict[tuple[str, Candidate], Built] = {}
        self._code = digest_measuring("tune_model.tune.measuring.step_bench")
        self._is_fresh = False

    def attend(self, contests: Sequence[Contest]) -> None:
        """Take the races."""
        self.contests = {contest.planned.key: contest for contest in contests}

    def fits(self, plan: Plan) -> bool:
        """Say whether the device has room for the model twice."""
        weights = {w.sources: w.type for program in plan.programs for w in program.weights}
        size_bytes = sum(
            math.prod(int(n) for n in type_.shape) * torch_dtype(type_.dtype).itemsize for type_ in weights.values()
        )
        target = self._shop.target
        limit = _MEMORY_PART * target.memory_bytes if isinstance(target, CudaTarget) else _CPU_BYTES
        return size_bytes <= limit

    def close(self) -> None:
        """Give the device back."""
        self._timer.close()

    def forget_process(self) -> None:
        """Let the next second look have a process of its own."""
        self._is_fresh = False

    def compare(
        self, first: Side, others: Sequence[Side], look: Look = "first", task: str = ""
    ) -> list[StepTiming | None]:
        """Return the times of sets of kernels beside those of the first, which is the baseline.

        They come from the records or are measured now; `None` where that fails. `task` is the one in which sets differ.
        """
        keys = [self._key(first, other, look) for other in others]
        known = {key: self._recorded(key) for key in keys}
        open_ = [(key, other) for key, other in zip(keys, others, strict=True) if known[key] is None]
        for start in range(0, len(open_), _AT_ONCE - 1):
            known |= self._measure(first, open_[start : start + _AT_ONCE - 1], look, task)
        return [known[key] for key in keys]

    def _key(self, first: Side, other: Side, look: Look) -> str:
        sides = tuple((fingerprint(p.program), str(p), self._keys(picks)) for p, picks in (first, other))
        return step_key(self._shop.target_key, self._code, look, sides)

    def _keys(self, picks: Picks) -> tuple[str, ...]:
        return tuple(self.contests[task].key_of(candidate) for task, candidate in sorted(picks.items()))

    def _recorded(self, key: str) -> StepTiming | None:
        return None if self._shop.options.recheck else self._shop.records.step(key)

    def _measure(
        self, first: Side, others: Sequence[tuple[str, Side]], look: Look, task: str
    ) -> dict[str, StepTiming | None]:
        """Time sets now; where that fails, in halves, so that a set that is at fault costs only itself."""
        shop, place = self._shop, others[0][1][0]
        if shop.is_over:
            self.cut_short = True
            return {}
        baseline = self._variant(*first)
        built = [(key, variant) for key, other in others if (variant := self._variant(*other)) is not None]
        if baseline is None or not built:
            return {}
        if look == "second" and not self._is_fresh:
            self._timer.close()  # asked again it is another process
            self._is_fresh = True
        seed = int(built[0][0][:12], 16) ^ (OTHER_INPUTS if look == "second" else 0)
        found = self._time(Work(dict(place.point), (baseline, *(variant for _, variant in built)), seed))
        if isinstance(found, Rejected):
            half = len(others) // 2
            if half:
                return self._measure(first, others[:half], look, task) | self._measure(first, others[half:], look, task)
            logger.warning("%s could not be timed as a whole: %s: %s", place, found.reason, found.detail)
            return {}
        shop.measured += len(found)
        made = {key: _timing(found[0], after) for (key, _), after in zip(built, found[1:], strict=True)}
        if any(timing.doubtful for timing in made.values()):
            logger.warning("%s was timed while other processes were in the way: it decides nothing", place)
        for key, timing in made.items():
            shop.records.add(key, task or _first_task(place), timing)
        return dict(made)

    def _time(self, work: Work) -> tuple[Samples, ...] | Rejected:
        """Time variants, again while other processes are in the way, and once more after a drift."""
        for attempt in range(_REPEATS):
            found = self._timer.compare(work)
            if isinstance(found, Rejected) or not any(samples.disturbed for samples in found):
                return found
            doubtful = any(samples.doubtful for samples in found)
            if (attempt and not doubtful) or (doubtful and not self._shop.pause()):
                return found
            self._shop.repeated += 1
        return self._timer.compare(work)

    def _variant(self, place: Place, picks: Picks) -> Variant | None:
        entries: dict[str, dict[tuple[int, ...], Entry]] = {}
        code: dict[str, bytes] = {}
        for (form, dims), task in place.tasks.items():
            built = self._obtain(task.key, picks[task.key])
            if built is None:
                return None
            code |= built.code
            entries.setdefault(form, {})[dims] = _entry(task.key, picks[task.key], dims, built.kernel)
        return Variant(place.program, {form: tuple(by_dims.values()) for form, by_dims in entries.items()}, code)

    def _obtain(self, task: str, candidate: Candidate) -> Built | None:
        place = (task, candidate)
        if place not in self._built:
            try:
                built = self.contests[task].builds.obtain(candidate)
            except (AbandonedRaceError, InterruptedRaceError):
                self.cut_short = True
                return None
            if isinstance(built, Rejected):
                return None
            self._built[place] = built
        return self._built[place]


def _first_task(place: Place) -> str:
    """Return the task that a step's rows are kept with: those of a model's tasks are its steps' too."""
    return min(task.key for task in place.tasks.values())


def _timing(before: Samples, after: Samples) -> StepTiming:
    ratio = paired_ratio(before.us, after.us)
    return StepTiming(
        baseline_us=percentile(before.us, 0.5),
        median_us=percentile(after.us, 0.5),
        gain=ratio.median,
        gain_low=ratio.low,
        gain_high=ratio.high,
        chance=chance_of_fewer(before.us, after.us, HARMS),
        doubtful=before.doubtful or after.doubtful,
    )


def _entry(task: str, candidate: Candidate, dims: tuple[int, ...], kernel: Kernel) -> Entry:
    return Entry(dims, task, label(candidate), kernel, 1.0, 1.0, 1.0, 1.0)
