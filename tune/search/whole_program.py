"""The last question to the choices: does the step as a whole get faster with them, and would it without one of them?

A kernel that wins alone may cost its neighbours more than it gains: it leaves other data in the caches, launches more,
or runs at other clocks. So whole programs are timed at every point of their grids, with torch's own operators and with
all choices. Where the step gains less than its tasks promise, every choice is taken out in turn. Those without which it
seems faster are looked at again, in a fresh process and with other inputs; where that is sure for all of them together,
and by as much as a winner needs to win, they are out.
"""

from collections.abc import Collection, Iterator, Sequence
from typing import Final, NamedTuple

from tune_model.extract.task import Plan
from tune_model.tune.candidate import Candidate, Rejected
from tune_model.tune.choice import WholeStep
from tune_model.tune.events import StepTimed
from tune_model.tune.measuring.interval import significant
from tune_model.tune.records.facts import StepTiming
from tune_model.tune.search.layouts import Settlement
from tune_model.tune.search.steps import HARMS, Picks, Place, Side, Steps, places_of
from tune_model.tune.workshop import Workshop

__all__ = ["WholeProgram"]

_PROMISED: Final = 0.8
"""A step that gains this part of what its tasks gain alone is believed."""


class _Suspect(NamedTuple):
    """A choice without which a step seemed faster.

    Attributes:
        place: The step.
        task: Key.
        picks: All choices.
        without: The same with the extern in its place.
    """

    place: Place
    task: str
    picks: Picks
    without: Picks


class WholeProgram:
    """Times steps with and without choices.

    Attributes:
        steps: What each takes, before and after; of the last settlement that was asked about.
    """

    def __init__(self, plan: Plan, shop: Workshop, steps: Steps) -> None:
        self._plan = plan
        self._shop = shop
        self._steps = steps
        self._dropped: dict[str, dict[Candidate, Rejected]] = {}
        self.steps: tuple[WholeStep, ...] = ()

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
        self._steps.forget_process()
        before = sum(len(found) for found in self._dropped.values())
        for plain, settled in self._places(settlement):
            timed, slower = self._examine(plain, settled, settlement)
            steps += timed
            suspects += slower
        self._look_again(suspects)
        self.steps = tuple(steps)
        return sum(len(found) for found in self._dropped.values()) == before

    def refresh(self, settlement: Settlement, tasks: Collection[str]) -> None:
        """Time the steps again in which some tasks' choices have changed; decides nothing.

        One that cannot be timed is left out: its old time is that of other kernels.
        """
        known = {(step.program, step.point): step for step in self.steps}
        stale = {
            (place.program.name, place.point)
            for place in places_of(settlement.plan)
            if not place.occurrences.keys().isdisjoint(tasks)
        }
        found = {place: step for place, step in known.items() if place not in stale}
        for plain, settled in self._places(settlement):
            if (settled.program.name, settled.point) in stale:
                found |= {(step.program, step.point): step for step in self._time(plain, settled, settlement)}
        self.steps = tuple(found[place] for place in dict.fromkeys((*known, *found)) if place in found)

    def _places(self, settlement: Settlement) -> Iterator[tuple[Place, Place]]:
        """Yield every place as the model has it and as it was settled, while there is time."""
        if not self._steps.fits(self._plan):
            return
        settled = {(place.program.name, place.point): place for place in places_of(settlement.plan)}
        for plain in places_of(self._plan):
            if self._shop.is_over:
                self._steps.cut_short = True
                return
            yield plain, settled[plain.program.name, plain.point]

    def _time(self, plain: Place, settled: Place, settlement: Settlement) -> list[WholeStep]:
        """Return what a step takes, unless that could not be found out or nothing in it was chosen."""
        picks = {key: settlement.winners[key].candidate for key in settled.occurrences}
        externs = {key: self._steps.contests[key].baseline for key in picks}
        if picks == externs:
            return []
        found = self._compare((plain, externs), (settled, picks))
        if found is None or found.doubtful:
            return []
        times = found.median_us, found.baseline_us
        return [WholeStep(settled.program.name, settled.point, *times, found.gain_low, found.gain_high)]

    def _examine(self, plain: Place, settled: Place, settlement: Settlement) -> tuple[list[WholeStep], list[_Suspect]]:
        """Time a step, and without each choice where it gains too little; returns those that seem to harm it too."""
        timed = self._time(plain, settled, settlement)
        if not timed:
            return [], []
        (step,) = timed
        winners = {key: settlement.winners[key] for key in settled.occurrences}
        picks = {key: winner.candidate for key, winner in winners.items()}
        externs = {key: self._steps.contests[key].baseline for key in picks}
        promised = sum(
            count * winners[key].median_us * (winners[key].gain - 1.0) for key, count in settled.occurrences.items()
        )
        if step.baseline_us - step.median_us >= _PROMISED * promised and step.gain_high >= 1.0:
            return timed, []
        return timed, self._take_out_each(settled, settlement, picks, externs)

    def _take_out_each(self, place: Place, settlement: Settlement, picks: Picks, externs: Picks) -> list[_Suspect]:
        """Time the step without each choice; returns those without which it seems faster."""
        slower: list[_Suspect] = []
        for key, candidate in picks.items():
            packed = any(layout != "transposed" for _, layout in settlement.winners[key].layouts)
            if candidate == externs[key] or packed or self._shop.is_over:
                continue  # the extern cannot read a packed weight
            without = {**picks, key: externs[key]}
            found = self._compare((place, without), (place, picks), key)
            if found is not None and not found.doubtful and found.gain_high <= HARMS:
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

    def _compare(self, first: Side, second: Side, task: str = "", *, again: bool = False) -> StepTiming | None:
        """Return the times of two sets of kernels; the first set's time is the baseline.

        `task` is the one in which the sets differ. Times that are taken `again` come from a fresh process, with other
        inputs.
        """
        (found,) = self._steps.compare(first, [second], "second" if again else "first", task)
        if found is not None:
            self._shop.report(StepTimed(str(second[0]), found.median_us, found.baseline_us, found.gain, task))
        return found


def _ms(us: float) -> str:
    return f"{us / 1e3:.4g} ms"
