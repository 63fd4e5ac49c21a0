"""The last word on new choices: each is measured again beside the extern, in a fresh process, with other inputs.

The winner of a final is the luckiest of several noisy times as well as the fastest, and it was compared with the
reference on one set of numbers. So before anything is shipped the winners are checked and timed once more. One that is
wrong is out; one that is slower than its final said competes with what it showed here, so the next finalist or the
extern may take its place, and is then measured in turn. What was confirmed is recorded and never measured again.
"""

from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

import msgspec

from tune_model.extract.task import Plan
from tune_model.tune.candidate import TRANSIENT_REASONS, Built, Candidate, Rejected
from tune_model.tune.device import Bench, Samples
from tune_model.tune.events import ChoiceConfirmed
from tune_model.tune.measuring.interval import paired_ratio, percentile
from tune_model.tune.records.database import Confirmation, Finalist
from tune_model.tune.records.identity import confirmation_key
from tune_model.tune.search.contest import Contest
from tune_model.tune.search.layouts import Settlement, settle_layouts
from tune_model.tune.search.race import MUST_GAIN, beats
from tune_model.tune.workshop import AbandonedRaceError, InterruptedRaceError, Workshop

__all__ = ["OTHER_INPUTS", "Guard", "judge"]

OTHER_INPUTS: Final = 0x5DEECE66D
"""Mixed into the seed of a first look: a second one has other inputs."""

_TOLERATED: Final = 0.97
"""Another process has other addresses and other neighbours in the cache: a gain this much lower is still the same."""

_REPEATS: Final = 3

Rival = tuple[Candidate, Built]


def judge(finalist: Finalist, found: Confirmation, extern: Finalist) -> Finalist | Rejected:
    """Say what a finalist that was measured again is worth.

    Args:
        finalist: As its final left it.
        found: What it showed when measured again.
        extern: Of the same final.

    Returns:
        The finalist itself where it holds; with what it showed now where that is worse than the final said; or why it
        is out.
    """
    if found.failed:
        return Rejected("guard", found.failed)
    if found.doubtful:
        return Rejected("guard", "other processes were in the way whenever it was measured again")
    still_beats = found.gain_low > 1.0 or not beats(finalist, extern)
    if still_beats and found.gain_high >= finalist.gain_low * _TOLERATED:
        return finalist
    return msgspec.structs.replace(
        finalist,
        median_us=extern.median_us / found.gain,  # on the scale of the final's other times
        gain=found.gain,
        gain_low=found.gain_low,
        gain_high=found.gain_high,
    )


class _Failed(NamedTuple):
    """The winner itself is at fault."""

    rejected: Rejected


class Guard:
    """Confirms the winners of a run.

    Attributes:
        unconfirmed: Tasks whose winner could not be measured again: the run had to stop, or the task did not open.
        cut_short: The run had to stop before all were confirmed.
        disturbed: Tasks with a finalist that could not be confirmed because other processes were in the way.
    """

    def __init__(self, plan: Plan, shop: Workshop) -> None:
        self.plan = plan
        self.shop = shop
        self.contests: dict[str, Contest] = {}
        self.unconfirmed: set[str] = set()
        self.cut_short = False
        self.disturbed: set[str] = set()
        self._found: dict[tuple[str, Candidate], Confirmation | None] = {}
        self._is_fresh = False

    def attend(self, contests: Sequence[Contest]) -> None:
        """Take the races whose winners are to be confirmed."""
        self.contests = {contest.planned.key: contest for contest in contests}

    def settle(self, finals: Mapping[str, Sequence[Finalist]], *, may_measure: bool) -> Settlement:
        """Settle the layouts, and with them the winners, until every winner but the extern is confirmed.

        Args:
            finals: Per task its finalists, the extern first.
            may_measure: Without it only what earlier runs confirmed can win.
        """
        self.cut_short = not may_measure
        while True:
            settlement = settle_layouts(self.plan, {task: self._standing(task, finals[task]) for task in finals})
            new = [task for task in finals if self._is_new(task, settlement.winners[task])]
            if not new:
                return settlement
            new.sort(key=lambda task: -self._at_stake(task, settlement.winners[task]))
            for place, task in enumerate(new):
                self.cut_short = self.cut_short or self.shop.is_over
                if self.cut_short or not self._confirm(task, settlement.winners[task]):
                    self.unconfirmed.add(task)
                    continue
                self._tell(task, settlement.winners[task], finals[task][0], (place, len(new)))

    def review(self, winners: Mapping[str, Finalist], extern: Mapping[str, Finalist]) -> bool:
        """Measure winners again that have to win whatever they gain; `False` when one is out, as it is wrong or fails.

        Args:
            winners: By task.
            extern: Of the same tasks.
        """
        new = [task for task in winners if self._is_new(task, winners[task])]
        for place, task in enumerate(new):
            self.cut_short = self.cut_short or self.shop.is_over
            if self.cut_short or not self._confirm(task, winners[task]):
                self.unconfirmed.add(task)
                continue
            self._tell(task, winners[task], extern[task], (place, len(new)))
        found = [self.confirmation(task, winners[task].candidate) for task in winners]
        return not any(known is not None and known.failed for known in found)

    def holds(self, task: str, candidate: Candidate) -> bool:
        """Say whether a candidate was right, and faster than the extern, when it was measured again."""
        found = self.confirmation(task, candidate)
        return found is not None and not found.failed and not found.doubtful and found.gain_low >= MUST_GAIN

    def confirmation(self, task: str, candidate: Candidate) -> Confirmation | None:
        """Return what a candidate showed when it was measured again, if it was, in this run or an earlier one."""
        place = (task, candidate)
        if place not in self._found:
            known = None if self.shop.options.recheck else self.shop.records.confirmation(self._key(task, candidate))
            self._found[place] = known
        return self._found[place]

    def replaced(self, task: str, finalists: Sequence[Finalist]) -> list[tuple[Candidate, Rejected]]:
        """Return the finalists that did not hold, and what they showed."""
        extern, *others = finalists
        found: list[tuple[Candidate, Rejected]] = []
        for finalist in others:
            known = self.confirmation(task, finalist.candidate)
            if known is None or known.failed:  # a failure is among the task's rejections already
                continue
            verdict = judge(finalist, known, extern)
            if isinstance(verdict, Rejected):
                found.append((finalist.candidate, verdict))
            elif verdict is not finalist:
                found.append((finalist.candidate, Rejected("guard", _less_than_said(finalist, verdict))))
        return found

    def _standing(self, task: str, finalists: Sequence[Finalist]) -> list[Finalist]:
        """Return the finalists that may win, with what is known of them."""
        extern, *others = finalists
        standing = [extern]
        for finalist in others:
            known = self.confirmation(task, finalist.candidate)
            if known is None:
                if task not in self.unconfirmed | self.disturbed:
                    standing.append(finalist)
                continue
            if known.doubtful:
                self.disturbed.add(task)
            verdict = judge(finalist, known, extern)
            if isinstance(verdict, Finalist):
                standing.append(verdict)
        return standing

    def _is_new(self, task: str, winner: Finalist) -> bool:
        baseline = self.contests[task].baseline
        return winner.candidate != baseline and self.confirmation(task, winner.candidate) is None

    def _at_stake(self, task: str, winner: Finalist) -> float:
        return self.contests[task].planned.weight * winner.median_us * (winner.gain - 1.0)

    def _key(self, task: str, candidate: Candidate) -> str:
        contest = self.contests[task]
        return confirmation_key(contest.key_of(candidate), contest.key_of(contest.baseline))

    def _tell(self, task: str, winner: Finalist, extern: Finalist, place: tuple[int, int]) -> None:
        found = self.confirmation(task, winner.candidate)
        if found is None:
            return
        verdict = judge(winner, found, extern)
        detail = verdict.detail if isinstance(verdict, Rejected) else _less_than_said(winner, verdict)
        held = verdict is winner
        index, total = place
        event = ChoiceConfirmed(index, total, task, winner.candidate, found.gain, held, "" if held else detail)
        self.shop.report(event)

    def _confirm(self, task: str, winner: Finalist) -> bool:
        """Measure a winner again and record what it showed; `False` when that cannot be done here."""
        if not self._is_fresh:
            self.shop.device.close()  # opened again it is another process
            self._is_fresh = True
        contest = self.contests[task]
        try:
            baseline, built = contest.builds.obtain(contest.baseline), contest.builds.obtain(winner.candidate)
        except (AbandonedRaceError, InterruptedRaceError):
            return False
        if isinstance(baseline, Rejected) or isinstance(built, Rejected):
            return False
        found = self._measure(contest, (contest.baseline, baseline), (winner.candidate, built))
        if isinstance(found, Rejected):
            return False
        self.shop.records.add(self._key(task, winner.candidate), task, found)
        self._found[task, winner.candidate] = found
        return True

    def _measure(self, contest: Contest, baseline: Rival, winner: Rival) -> Confirmation | Rejected:
        """Check a winner and time it beside the extern; `Rejected` when the task cannot be measured.

        A failure is final for its key, so one that a busy machine may have caused has to happen twice.
        """
        found = self._look(contest, baseline, winner)
        if isinstance(found, _Failed) and found.rejected.reason in TRANSIENT_REASONS and not self.shop.is_over:
            found = self._look(contest, baseline, winner)
        return self._refuse(contest, winner[0], found.rejected) if isinstance(found, _Failed) else found

    def _look(self, contest: Contest, baseline: Rival, winner: Rival) -> Confirmation | Rejected | _Failed:
        device = self.shop.device
        opened = device.open(
            Bench(contest.planned.task, contest.policy, baseline[1], contest.trials.seed ^ OTHER_INPUTS)
        )
        if isinstance(opened, Rejected):
            return opened
        try:
            checked = device.check(*winner)
            if isinstance(checked, Rejected):
                return _Failed(checked)
            times = self._compare(contest, (baseline, winner))
            if isinstance(times, Rejected):
                return _Failed(times)  # with the extern; that alone would not fail
            if isinstance(times[0], Rejected):
                return times[0]
            if isinstance(times[1], Rejected):
                return _Failed(times[1])
            contest.trials.write_guard(baseline[0], times[0], opened.error)
            contest.trials.write_guard(winner[0], times[1], checked.error)
            return _confirmation(winner[0], times[0], times[1])
        finally:
            device.finish()

    def _compare(self, contest: Contest, pair: tuple[Rival, Rival]) -> tuple[Samples | Rejected, ...] | Rejected:
        """Time the pair interleaved, again while other processes are in the way."""
        for attempt in range(_REPEATS):
            times = self.shop.device.compare(pair, contest.policy.final)
            if isinstance(times, Rejected):
                return times
            extern = times[0]
            if isinstance(extern, Rejected) or not extern.disturbed or (attempt and not extern.doubtful):
                return times
            if extern.doubtful and not self.shop.pause():
                return times
            self.shop.repeated += 1
        return self.shop.device.compare(pair, contest.policy.final)

    def _refuse(self, contest: Contest, candidate: Candidate, rejected: Rejected) -> Confirmation | Rejected:
        """Take a candidate that is wrong, or fails, out of all races and of what their finals found."""
        if rejected.reason == "abandoned":
            return rejected
        contest.trials.refuse(
            candidate, Rejected(rejected.reason, f"{rejected.detail} (after it had won, on other inputs)")
        )
        return Confirmation(candidate, failed=f"{rejected.reason}: {rejected.detail}")


def _confirmation(candidate: Candidate, extern: Samples, winner: Samples) -> Confirmation:
    ratio = paired_ratio(extern.us, winner.us)
    median_us, baseline_us = percentile(winner.us, 0.5), percentile(extern.us, 0.5)
    doubtful = winner.doubtful
    return Confirmation(candidate, median_us, baseline_us, ratio.median, ratio.low, ratio.high, doubtful=doubtful)


def _less_than_said(finalist: Finalist, shown: Finalist) -> str:
    def text(f: Finalist) -> str:
        return f"{f.gain:.2f}x ({f.gain_low:.2f} to {f.gain_high:.2f})"

    return f"{text(shown)} when measured again, {text(finalist)} in the final"
