"""The last question to the choices: does the step as a whole get faster with them, and would it without one of them?

A kernel that wins alone may cost its neighbours more than it gains: it leaves other data in the caches, launches more,
or runs at other clocks. So whole programs are timed at every point of their grids, with torch's own operators and with
all choices. Where the step gains less than its tasks promise, every choice is taken out in turn, and one without which
the step is surely faster is out. Times are recorded like those of races, so a second run measures nothing.
"""

import logging
import math
from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

from tune_model.extract.task import Plan, PlannedTask
from tune_model.runtime.execution.invoke import torch_dtype
from tune_model.runtime.kernel import Kernel
from tune_model.runtime.program import Program, fingerprint
from tune_model.runtime.replay import Entry
from tune_model.tune.candidate import Built, Candidate, Rejected, label
from tune_model.tune.choice import WholeStep
from tune_model.tune.events import StepTimed
from tune_model.tune.measuring.interval import paired_ratio, percentile
from tune_model.tune.measuring.step_bench import StepTimer, Variant, Work
from tune_model.tune.records.database import Confirmation
from tune_model.tune.records.identity import step_key
from tune_model.tune.search.contest import Contest
from tune_model.tune.search.layouts import Settlement
from tune_model.tune.target import CudaTarget
from tune_model.tune.workshop import Workshop

__all__ = ["WholeProgram"]

_PROMISED: Final = 0.8
"""A step that gains this part of what its tasks gain alone is believed."""

_MEMORY_PART: Final = 0.4
"""Of the device's memory that a model's weights may take: they are there twice, plain and re-laid."""

_CPU_BYTES: Final = 4 << 30

Point = tuple[tuple[str, int], ...]
Picks = Mapping[str, Candidate]

logger = logging.getLogger(__name__)


class _Place(NamedTuple):
    """A program at a point of its grid, and the tasks that run there."""

    program: Program
    point: Point
    tasks: Mapping[tuple[str, tuple[int, ...]], PlannedTask]
    occurrences: Mapping[str, int]

    def __str__(self) -> str:
        return " ".join([self.program.name, *(f"{name}={value}" for name, value in self.point)])


class WholeProgram:
    """Times steps with and without choices.

    Attributes:
        steps: What each takes, before and after; of the last settlement that was asked about.
    """

    def __init__(self, plan: Plan, shop: Workshop, timer: StepTimer) -> None:
        self._plan = plan
        self._shop = shop
        self._timer = timer
        self._contests: dict[str, Contest] = {}
        self._dropped: dict[str, dict[Candidate, Rejected]] = {}
        self._built: dict[tuple[str, Candidate], Built] = {}
        self.steps: tuple[WholeStep, ...] = ()

    def attend(self, contests: Sequence[Contest]) -> None:
        """Take the races whose choices are looked at."""
        self._contests = {contest.planned.key: contest for contest in contests}

    def close(self) -> None:
        """Give the device back."""
        self._timer.close()

    def rejections(self, task: str) -> list[tuple[Candidate, Rejected]]:
        """Return a task's winners without which a step is faster."""
        return list(self._dropped.get(task, {}).items())

    def dropped(self, task: str) -> frozenset[Candidate]:
        """Return the candidates that may not win a task any more."""
        return frozenset(self._dropped.get(task, ()))

    def examine(self, settlement: Settlement) -> bool:
        """Time every step; `False` when a choice is out now and the rest has to be settled again."""
        steps: list[WholeStep] = []
        before = sum(len(found) for found in self._dropped.values())
        if self._fits():
            settled = {(place.program.name, place.point): place for place in _places(settlement.plan)}
            for plain in _places(self._plan):
                if self._shop.is_over:
                    break
                timed = self._examine(plain, settled[plain.program.name, plain.point], settlement)
                if timed is not None:
                    steps.append(timed)
        self.steps = tuple(steps)
        return sum(len(found) for found in self._dropped.values()) == before

    def _fits(self) -> bool:
        weights = {w.sources: w.type for program in self._plan.programs for w in program.weights}
        size_bytes = sum(
            math.prod(int(n) for n in type_.shape) * torch_dtype(type_.dtype).itemsize for type_ in weights.values()
        )
        target = self._shop.target
        limit = _MEMORY_PART * target.memory_bytes if isinstance(target, CudaTarget) else _CPU_BYTES
        return size_bytes <= limit

    def _examine(self, plain: _Place, settled: _Place, settlement: Settlement) -> WholeStep | None:
        """Time a step; returns what it takes, `None` when it could not be timed or nothing in it was chosen."""
        winners = {key: settlement.winners[key] for key in settled.occurrences}
        picks = {key: winner.candidate for key, winner in winners.items()}
        externs = {key: self._contests[key].baseline for key in picks}
        if picks == externs:
            return None
        found = self._compare((plain, externs), (settled, picks))
        if found is None:
            return None
        alone = {key: count * winners[key].median_us for key, count in settled.occurrences.items()}
        promised = sum(us * (winners[key].gain - 1.0) for key, us in alone.items())
        if found.baseline_us - found.median_us < _PROMISED * promised or found.gain_high < 1.0:
            self._take_out_each(settled, settlement, picks, externs)
        times = found.median_us, found.baseline_us
        return WholeStep(settled.program.name, settled.point, *times, found.gain_low, found.gain_high)

    def _take_out_each(self, place: _Place, settlement: Settlement, picks: Picks, externs: Picks) -> None:
        """Time the step without each choice; one without which it is surely faster is out."""
        for key, candidate in picks.items():
            packed = any(layout != "transposed" for _, layout in settlement.winners[key].layouts)
            if candidate == externs[key] or packed or self._shop.is_over:
                continue  # the extern cannot read a packed weight
            found = self._compare((place, {**picks, key: externs[key]}), (place, picks), key)
            if found is not None and found.gain_high < 1.0:
                detail = (
                    f"{place}: the step takes {_ms(found.median_us)} with it and {_ms(found.baseline_us)} without "
                    f"({found.gain:.3g}x, {found.gain_low:.3g} to {found.gain_high:.3g})"
                )
                self._dropped.setdefault(key, {})[candidate] = Rejected("step", detail)

    def _compare(
        self, first: tuple[_Place, Picks], second: tuple[_Place, Picks], task: str = ""
    ) -> Confirmation | None:
        """Return the times of two sets of kernels, from the records or measured now; `None` when that fails.

        The first set's time is the baseline. `task` is the one in which the sets differ.
        """
        shop, place = self._shop, second[0]
        sides = tuple((fingerprint(p.program), str(p), self._keys(picks)) for p, picks in (first, second))
        key = step_key(shop.target_key, sides)
        known = None if shop.options.recheck else shop.records.confirmation(key)
        if known is not None:
            self._tell(place, task, known)
            return known
        variants = [variant for p, picks in (first, second) if (variant := self._variant(p, picks)) is not None]
        if len(variants) < 2:
            return None
        found = self._timer.compare(Work(dict(place.point), tuple(variants), int(key[:12], 16)))
        if isinstance(found, Rejected):
            logger.warning("%s could not be timed as a whole: %s: %s", place, found.reason, found.detail)
            return None
        before, after = found
        shop.measured += 2
        ratio = paired_ratio(before.us, after.us)
        medians = percentile(after.us, 0.5), percentile(before.us, 0.5)
        candidate = second[1][task] if task else Candidate("step")
        made = Confirmation(candidate, *medians, ratio.median, ratio.low, ratio.high)
        shop.records.add(key, task or str(place), made)
        self._tell(place, task, made)
        return made

    def _tell(self, place: _Place, task: str, found: Confirmation) -> None:
        self._shop.report(StepTimed(str(place), found.median_us, found.baseline_us, found.gain, task))

    def _keys(self, picks: Picks) -> tuple[str, ...]:
        return tuple(self._contests[task].key_of(candidate) for task, candidate in sorted(picks.items()))

    def _variant(self, place: _Place, picks: Picks) -> Variant | None:
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
            built = self._contests[task].builds.obtain(candidate)
            if isinstance(built, Rejected):
                return None
            self._built[place] = built
        return self._built[place]


def _entry(task: str, candidate: Candidate, dims: tuple[int, ...], kernel: Kernel) -> Entry:
    return Entry(dims, task, label(candidate), kernel, 1.0, 1.0, 1.0, 1.0)


def _ms(us: float) -> str:
    return f"{us / 1e3:.4g} ms"


def _places(plan: Plan) -> list[_Place]:
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
    return [_Place(programs[name], point, tasks[name, point], counts[name, point]) for name, point in sorted(tasks)]
