"""The last question to the choices: does the step as a whole get faster with them, and would it without one of them?

A kernel that wins alone may cost its neighbours more than it gains: it leaves other data in the caches, launches more,
or runs at other clocks. So whole programs are timed at every point of their grids, with torch's own operators and with
all choices. Where the step gains less than its tasks promise, every choice is taken out in turn. Those without which it
seems faster are looked at again, in a fresh process and with other inputs; where that is sure for all of them together,
and by as much as a winner needs to win, they are out. Times are recorded like those of races, so a second run measures
nothing.
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
from tune_model.tune.building.source import digest_measuring
from tune_model.tune.candidate import Built, Candidate, Rejected, label
from tune_model.tune.choice import WholeStep
from tune_model.tune.device import Samples
from tune_model.tune.events import StepTimed
from tune_model.tune.measuring.interval import chance_of_fewer, paired_ratio, percentile, significant
from tune_model.tune.measuring.step_bench import StepTimer, Variant, Work
from tune_model.tune.records.facts import StepTiming
from tune_model.tune.records.identity import step_key
from tune_model.tune.search.contest import Contest
from tune_model.tune.search.layouts import Settlement
from tune_model.tune.search.race import MUST_GAIN
from tune_model.tune.target import CudaTarget
from tune_model.tune.workshop import Workshop

__all__ = ["WholeProgram"]

_PROMISED: Final = 0.8
"""A step that gains this part of what its tasks gain alone is believed."""

_MEMORY_PART: Final = 0.4
"""Of the device's memory that a model's weights may take: they are there twice, plain and re-laid."""

_CPU_BYTES: Final = 4 << 30

_HARMS: Final = 1.0 / MUST_GAIN
"""A step's gain below which a choice harms it: what is not enough to win by is not enough to be given up for."""

_OTHER_INPUTS: Final = 0x5DEECE66D
_REPEATS: Final = 3
"""Of times that something disturbs, as in races."""

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


class _Suspect(NamedTuple):
    """A choice without which a step seemed faster.

    Attributes:
        place: The step.
        task: Key.
        picks: All choices.
        without: The same with the extern in its place.
    """

    place: _Place
    task: str
    picks: Picks
    without: Picks


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
        self._code = digest_measuring("tune_model.tune.measuring.step_bench")
        self._is_fresh = False
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
        suspects: list[_Suspect] = []
        self._is_fresh = False
        before = sum(len(found) for found in self._dropped.values())
        if self._fits():
            settled = {(place.program.name, place.point): place for place in _places(settlement.plan)}
            for plain in _places(self._plan):
                if self._shop.is_over:
                    break
                timed, slower = self._examine(plain, settled[plain.program.name, plain.point], settlement)
                steps += timed
                suspects += slower
        self._look_again(suspects)
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

    def _examine(
        self, plain: _Place, settled: _Place, settlement: Settlement
    ) -> tuple[list[WholeStep], list[_Suspect]]:
        """Time a step; returns what it takes, unless that could not be found out or nothing in it was chosen."""
        winners = {key: settlement.winners[key] for key in settled.occurrences}
        picks = {key: winner.candidate for key, winner in winners.items()}
        externs = {key: self._contests[key].baseline for key in picks}
        if picks == externs:
            return [], []
        found = self._compare((plain, externs), (settled, picks))
        if found is None or found.doubtful:
            return [], []
        alone = {key: count * winners[key].median_us for key, count in settled.occurrences.items()}
        promised = sum(us * (winners[key].gain - 1.0) for key, us in alone.items())
        slower: list[_Suspect] = []
        if found.baseline_us - found.median_us < _PROMISED * promised or found.gain_high < 1.0:
            slower = self._take_out_each(settled, settlement, picks, externs)
        times = found.median_us, found.baseline_us
        return [WholeStep(settled.program.name, settled.point, *times, found.gain_low, found.gain_high)], slower

    def _take_out_each(self, place: _Place, settlement: Settlement, picks: Picks, externs: Picks) -> list[_Suspect]:
        """Time the step without each choice; returns those without which it seems faster."""
        slower: list[_Suspect] = []
        for key, candidate in picks.items():
            packed = any(layout != "transposed" for _, layout in settlement.winners[key].layouts)
            if candidate == externs[key] or packed or self._shop.is_over:
                continue  # the extern cannot read a packed weight
            without = {**picks, key: externs[key]}
            found = self._compare((place, without), (place, picks), key)
            if found is not None and not found.doubtful and found.gain_high <= _HARMS:
                slower.append(_Suspect(place, key, picks, without))
        return slower

    def _look_again(self, suspects: Sequence[_Suspect]) -> None:
        """Put out the choices that harm a step in a second look too, as far as that is sure for all of them together.

        Of many choices that change nothing one in forty seems to harm a step: each was asked at 95 %.
        """
        looks = [
            None if self._shop.is_over else self._compare((s.place, s.without), (s.place, s.picks), s.task, again=True)
            for s in suspects
        ]
        chances = [1.0 if found is None or found.doubtful else found.chance for found in looks]
        for suspect, found, is_sure in zip(suspects, looks, significant(chances), strict=True):
            if found is not None and is_sure:
                detail = (
                    f"{suspect.place}: the step takes {_ms(found.median_us)} with it and {_ms(found.baseline_us)} "
                    f"without ({found.gain:.3g}x, {found.gain_low:.3g} to {found.gain_high:.3g})"
                )
                out = self._dropped.setdefault(suspect.task, {})
                out.setdefault(suspect.picks[suspect.task], Rejected("step", detail))

    def _compare(
        self, first: tuple[_Place, Picks], second: tuple[_Place, Picks], task: str = "", *, again: bool = False
    ) -> StepTiming | None:
        """Return the times of two sets of kernels, from the records or measured now; `None` when that fails.

        The first set's time is the baseline. `task` is the one in which the sets differ. Times that are taken `again`
        come from a fresh process, with other inputs.
        """
        shop, place = self._shop, second[0]
        sides = tuple((fingerprint(p.program), str(p), self._keys(picks)) for p, picks in (first, second))
        key = step_key(shop.target_key, self._code, "second" if again else "first", sides)
        known = None if shop.options.recheck else shop.records.step(key)
        if known is not None:
            self._tell(place, task, known)
            return known
        variants = [variant for p, picks in (first, second) if (variant := self._variant(p, picks)) is not None]
        if len(variants) < 2:
            return None
        if again and not self._is_fresh:
            self._timer.close()  # asked again it is another process
            self._is_fresh = True
        seed = int(key[:12], 16) ^ (_OTHER_INPUTS if again else 0)
        found = self._time(Work(dict(place.point), tuple(variants), seed))
        if isinstance(found, Rejected):
            logger.warning("%s could not be timed as a whole: %s: %s", place, found.reason, found.detail)
            return None
        before, after = found
        shop.measured += 2
        made = _timing(before, after)
        if made.doubtful:
            logger.warning("%s was timed while other processes were in the way: it decides nothing", place)
        shop.records.add(key, task or str(place), made)
        self._tell(place, task, made)
        return made

    def _time(self, work: Work) -> tuple[Samples, ...] | Rejected:
        """Time two variants, again while other processes are in the way, and once more after a drift."""
        for attempt in range(_REPEATS):
            found = self._timer.compare(work)
            if isinstance(found, Rejected) or not any(samples.disturbed for samples in found):
                return found
            doubtful = any(samples.doubtful for samples in found)
            if (attempt and not doubtful) or (doubtful and not self._shop.pause()):
                return found
            self._shop.repeated += 1
        return self._timer.compare(work)

    def _tell(self, place: _Place, task: str, found: StepTiming) -> None:
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


def _timing(before: Samples, after: Samples) -> StepTiming:
    ratio = paired_ratio(before.us, after.us)
    return StepTiming(
        baseline_us=percentile(before.us, 0.5),
        median_us=percentile(after.us, 0.5),
        gain=ratio.median,
        gain_low=ratio.low,
        gain_high=ratio.high,
        chance=chance_of_fewer(before.us, after.us, _HARMS),
        doubtful=before.doubtful or after.doubtful,
    )


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
