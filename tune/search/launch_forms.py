"""How the kernels of a step start, decided by the step: as dependent launches or not, and what they ask for ahead.

A race times a kernel behind itself. In a step it follows another one, which leaves memory idle where its successor
could begin, or has none to spare. So at every point of the grids the step is timed with each choice in the other forms
that its race timed, a few sets of kernels in the same rounds. The forms that gain are then put together, the one that
gains most first, and these sets are timed again: of gains that get into each other's way as many stay as make the step
fastest.
"""

from collections import Counter
from collections.abc import Mapping, Sequence, Set
from typing import Final, NamedTuple, TypeGuard

import msgspec

from tune_model.tune.candidate import Candidate, Rejected, label
from tune_model.tune.events import StepTurned
from tune_model.tune.records.facts import Finalist, StepTiming
from tune_model.tune.search.layouts import Settlement
from tune_model.tune.search.steps import Place, Steps, places_of
from tune_model.tune.workshop import Workshop

__all__ = ["LaunchForms", "Turn"]

_LAUNCH: Final = frozenset({"pdl", "prefetch"})
"""Parameters that change how a kernel starts, and nothing that it computes."""

_LONG_US: Final = 100.0
"""A kernel that takes longer hardly notices how it starts."""

_GAP_US: Final = 1.0
_NOTICED: Final = 0.001
"""A microsecond for every time that a kernel runs has to be this part of the step."""


class Turn(NamedTuple):
    """A step, and the forms with which it is faster.

    Attributes:
        place: The step.
        before: Winners by task.
        forms: What takes their place. What is said of them is from their races; they have met the extern in no final.
        timed: All of them beside the winners.
    """

    place: Place
    before: Mapping[str, Candidate]
    forms: Mapping[str, Finalist]
    timed: StepTiming


class LaunchForms:
    """Finds the forms of a settlement's winners with which its steps are faster."""

    def __init__(self, shop: Workshop, steps: Steps) -> None:
        self._shop = shop
        self._steps = steps
        self._left: dict[str, tuple[Candidate, Rejected]] = {}

    def rejections(self, task: str) -> list[tuple[Candidate, Rejected]]:
        """Return the winner of a task that another form of it took the place of."""
        return [self._left[task]] if task in self._left else []

    def take(self, turns: Sequence[Turn]) -> None:
        """Note and report the forms that are taken."""
        for place, before, forms, timed in turns:
            self._shop.report(StepTurned(str(place), timed.median_us, timed.baseline_us, timed.gain, tuple(forms)))
            others = f" and other forms of {len(forms) - 1} more tasks" if len(forms) > 1 else ""
            for key, form in forms.items():
                changed = _changed(before[key], form.candidate)
                detail = f"{place}: the step is {timed.gain:.4g}x as fast with {changed}{others}"
                self._left[key] = before[key], Rejected("step", detail)

    def turn(self, settlement: Settlement, without: Set[tuple[str, Candidate]]) -> list[Turn]:
        """Return the forms that make steps faster than the winners do.

        Args:
            settlement: With the winners.
            without: Tasks and forms that are out.
        """
        if not self._steps.fits(settlement.plan):
            return []
        places = places_of(settlement.plan)
        counts = Counter(key for place in places for key in place.occurrences)
        found: list[Turn] = []
        for place in places:
            if self._shop.is_over:
                self._steps.cut_short = True
                break
            winners = {key: settlement.winners[key] for key in place.occurrences}
            step_us = sum(count * winners[key].median_us for key, count in place.occurrences.items())
            noticed = [
                key
                for key, count in place.occurrences.items()
                if counts[key] == 1 and count * _GAP_US >= _NOTICED * step_us
            ]
            forms = {key: [c for c in self._forms(key, winners[key]) if (key, c) not in without] for key in noticed}
            found += self._turn(place, winners, forms)
        return found

    def _turn(
        self, place: Place, winners: Mapping[str, Finalist], forms: Mapping[str, Sequence[Candidate]]
    ) -> list[Turn]:
        picks = {key: winner.candidate for key, winner in winners.items()}
        asked = [(key, form) for key in forms for form in forms[key]]
        singles = self._steps.compare((place, picks), [(place, {**picks, key: form}) for key, form in asked], "single")
        best: dict[str, tuple[float, Candidate]] = {}
        for (key, form), timed in zip(asked, singles, strict=True):
            if _gains(timed) and timed.gain > best.get(key, (1.0, form))[0]:
                best[key] = timed.gain, form
        order = sorted(best, key=lambda key: -best[key][0])
        sets = [{key: best[key][1] for key in order[: count + 1]} for count in range(len(order))]
        timings = self._steps.compare((place, picks), [(place, {**picks, **turned}) for turned in sets], "together")
        gains = [(timed, turned) for timed, turned in zip(timings, sets, strict=True) if _gains(timed)]
        if not gains:
            return []
        timed, turned = max(gains, key=lambda pair: pair[0].gain)
        return [Turn(place, picks, {k: self._as_raced(k, form, winners[k]) for k, form in turned.items()}, timed)]

    def _forms(self, task: str, winner: Finalist) -> list[Candidate]:
        """Return the other forms of a winner that its race timed."""
        contest = self._steps.contests[task]
        if winner.median_us > _LONG_US or not {name for name, _ in winner.candidate.config} & _LAUNCH:
            return []
        return [c for c in contest.times_us() if c != winner.candidate and _tile(c) == _tile(winner.candidate)]

    def _as_raced(self, task: str, form: Candidate, winner: Finalist) -> Finalist:
        contest = self._steps.contests[task]
        times = contest.times_us()
        gain = times[contest.baseline] / times[form]
        return msgspec.structs.replace(
            winner, candidate=form, median_us=times[form], gain=gain, gain_low=gain, gain_high=gain
        )


def _tile(candidate: Candidate) -> tuple[object, ...]:
    return candidate.family, tuple(pair for pair in candidate.config if pair[0] not in _LAUNCH)


def _changed(before: Candidate, after: Candidate) -> str:
    there = dict(before.config)
    changes = ", ".join(f"{name}={value}" for name, value in after.config if there[name] != value)
    return f"{changes} of {label(before)}"


def _gains(timed: StepTiming | None) -> TypeGuard[StepTiming]:
    return timed is not None and not timed.doubtful and timed.gain_low > 1.0
