"""From a finished race and the settlement to a task's choice: from the records and the store, measuring nothing."""

from collections.abc import Iterable, Mapping
from typing import Protocol

from tune_model.runtime.errors import TuneModelError
from tune_model.tune.candidate import Candidate, Rejected, label
from tune_model.tune.choice import Choice, Measurement
from tune_model.tune.records.database import Finalist, Timing
from tune_model.tune.records.facts import Trail
from tune_model.tune.search.contest import Contest
from tune_model.tune.search.guard import Guard
from tune_model.tune.search.invariance import is_bound
from tune_model.tune.search.layouts import Settlement
from tune_model.tune.search.race import beats

__all__ = ["Assembly", "WinnerLostError", "finalists_of", "status_of"]


class WinnerLostError(TuneModelError):
    """The records name a winner whose machine code is gone and cannot be built again."""


class Judge(Protocol):
    """What took winners out after their races."""

    def rejections(self, task: str) -> list[tuple[Candidate, Rejected]]:
        """Return a task's candidates that it took out, and why."""


class Assembly:
    """Makes choices.

    Args:
        guard: Confirmed the winners.
        judges: Have looked at whole programs.
    """

    def __init__(self, guard: Guard, judges: Iterable[Judge]) -> None:
        self._guard = guard
        self._judges = tuple(judges)

    def choose(self, contest: Contest, settlement: Settlement) -> tuple[Choice, Mapping[str, bytes]]:
        """Return a task's choice and its machine code.

        Raises:
            WinnerLostError: The winner is no longer in the store, and does not build.
        """
        key = contest.planned.key
        winner = settlement.winners[key]
        built = contest.builds.obtain(winner.candidate)
        if isinstance(built, Rejected):
            msg = (
                f"{contest.planned.label}: the recorded winner {label(winner.candidate)} no longer builds "
                f"({built.reason}: {built.detail}); tune again with --recheck"
            )
            raise WinnerLostError(msg)
        rows = contest.rows()
        finalists = finalists_of(contest)
        rejections = [*contest.refused, *contest.refusals().items()]
        rejections += self._guard.replaced(key, finalists)
        for judge in self._judges:
            rejections += judge.rejections(key)
        if key in settlement.passed_over:
            rejections.append(settlement.passed_over[key])
        again = self._guard.confirmation(key, winner.candidate)
        choice = Choice(
            task=key,
            winner=winner.candidate,
            kernel=built.kernel,
            median_us=winner.median_us if again is None else again.median_us,
            baseline_us=finalists[0].median_us if again is None else again.baseline_us,
            gain_low=winner.gain_low if again is None else again.gain_low,
            gain_high=winner.gain_high if again is None else again.gain_high,
            measurements=tuple(_measurement(row) for row in rows if isinstance(row, Timing)),
            rejections=tuple(dict.fromkeys(rejections)),
            status=self._status(contest, winner),
            trails=tuple({row.candidate: row for row in rows if isinstance(row, Trail)}.values()),
        )
        return choice, built.code

    def _status(self, contest: Contest, winner: Finalist) -> str:
        """Return a choice's status: of a race, and of an extern that stays because a winner was not confirmed."""
        if is_bound(contest.planned.task) and contest.outcome is not None and not contest.outcome.failed:
            return "unconfirmed" if winner.candidate == contest.baseline else "invariant"
        if winner.candidate == contest.baseline and contest.outcome is not None:
            if contest.planned.key in self._guard.unconfirmed:
                return "unconfirmed"
            if contest.planned.key in self._guard.disturbed:
                return "disturbed"
        return status_of(contest, winner)


def finalists_of(contest: Contest) -> tuple[Finalist, ...]:
    """Return a race's finalists: the extern alone where there was no final, or one that decides nothing."""
    if contest.outcome is not None and contest.outcome.finalists:
        finalists = contest.outcome.finalists
        return finalists[:1] if finalists[0].doubtful else finalists
    return (Finalist(contest.baseline, (), contest.trials.extern_us or 0.0, 1.0, 1.0, 1.0, 1, unconditional=False),)


def status_of(contest: Contest, winner: Finalist) -> str:
    """Return a race's status, were this its winner."""
    if contest.outcome is None:
        return "not searched"
    if contest.outcome.failed:
        return f"failed: {contest.outcome.failed}"
    extern = finalists_of(contest)[0]
    if extern.doubtful:
        return "disturbed"
    if winner.candidate == contest.baseline:
        return "no gain"
    return "tuned" if beats(winner, extern) else "layout"


def _measurement(timing: Timing) -> Measurement:
    return Measurement(
        timing.candidate,
        timing.median_us,
        timing.low_us,
        timing.high_us,
        timing.samples,
        timing.stage,
        timing.error,
        timing.disturbed,
    )
