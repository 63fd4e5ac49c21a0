"""The tuner: from a plan to one choice per task.

1. For every task list the candidates, and look up which races the records already hold the outcome of. One that is
   stale, because the machine's software or model changed, is run again between its finalists only.
2. For every other task, heaviest first: build in a pool of processes (on a GPU ahead of the measuring), check against
   the reference, race, and time the finalists interleaved with the extern. Every measurement is committed before the
   next starts, so whatever ends the run, running it again continues there.
3. Where steps may be grouped into regions in several ways, keep the grouping whose tasks take the least time.
4. Settle the weight layouts over all tasks that read a weight; that decides each task's winner. New winners are
   measured again in a fresh process; where one does not hold, settle again.
5. Time whole programs with the choices (not at effort quick); one without which a step is faster is out, and the rest
   is settled again. Let kernels start in the way that makes the step fastest.
6. Fetch the winners' machine code from the store.

Nothing is decided from memory: choices are assembled from the records, so a second run gives the same bytes.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing, nullcontext
from typing import Final, Literal

import msgspec

from tune_model.extract.task import Plan, all_tasks
from tune_model.tune.assembly import Assembly, finalists_of, status_of
from tune_model.tune.candidate import Candidate, Effort
from tune_model.tune.choice import Choice, Tuning
from tune_model.tune.device import Device
from tune_model.tune.estimate import call_us, estimate_seconds, floor_us, program_bytes, survey_seconds
from tune_model.tune.events import Event, RecordsDamaged, TaskDone, TaskStarted, TuneFinished, TuneStarted
from tune_model.tune.families import families_for
from tune_model.tune.interruption import interruptible
from tune_model.tune.machine.cuda import require_gpu
from tune_model.tune.measuring.policy import policy_for
from tune_model.tune.measuring.step_bench import StepTimer, StepWorker
from tune_model.tune.measuring.worker import DeviceWorker, open_workbench
from tune_model.tune.options import TuneOptions
from tune_model.tune.records.database import Finalist
from tune_model.tune.search.contest import Contest
from tune_model.tune.search.groupings import choose_grouping
from tune_model.tune.search.guard import Guard
from tune_model.tune.search.invariance import RaceTimes, is_bound, served_at_every_size, settle_invariant
from tune_model.tune.search.launch_forms import LaunchForms
from tune_model.tune.search.layouts import Settlement
from tune_model.tune.search.race import select_winner
from tune_model.tune.search.steps import Steps
from tune_model.tune.search.whole_program import WholeProgram
from tune_model.tune.target import CudaTarget, Target
from tune_model.tune.workshop import InterruptedRaceError, Workshop

__all__ = ["tune", "tune_with"]

_AHEAD: Final = 8
"""Queued builds per build process: enough that none idles while a race is measured."""

_SURVEY_PART: Final = 0.1
"""Of a budget, that may be spent on timing the externs before the first race."""

_LEAST_GAIN: Final = 0.05
"""Of an extern's time, that may always be gained."""


def tune(plan: Plan, target: Target, options: TuneOptions, report: Callable[[Event], None]) -> Tuning:
    """Tune every task of a plan on this machine.

    The first Ctrl-C, SIGTERM or SIGHUP lets the candidate in flight finish and returns what there is
    (`Tuning.stopped`); a second one raises `KeyboardInterrupt`.

    Args:
        plan: As extracted.
        target: As probed.
        options: Effort, budget, where records and kernels are.
        report: Told what happens, in this thread.

    Raises:
        RecordsError: The records cannot be opened or written.
        StoreError: Built kernels cannot be written.
        TargetError: The target is a GPU that this machine does not have.
    """
    if isinstance(target, CudaTarget):
        require_gpu(target, 0)
    device: Device
    if options.isolate:
        device = worker = DeviceWorker(target)
    else:
        device, worker = open_workbench(target, 0), None
    shop = Workshop(families_for(target), target, device, options, report)
    steps: StepTimer | None = None
    if worker is not None:
        worker.seconds_left = shop.seconds_left
        if options.effort is not Effort.QUICK:
            steps = timer = StepWorker(target)
            timer.seconds_left = shop.seconds_left
    return tune_with(plan, shop, steps)


def tune_with(plan: Plan, shop: Workshop, steps: StepTimer | None = None) -> Tuning:
    """Tune with given equipment, which is closed at the end; without `steps` no whole program is timed."""
    with closing(shop), closing(steps) if steps is not None else nullcontext(), interruptible(shop.stop):
        return _Run(plan, shop, steps).run()


class _Run:
    """One run over a plan."""

    def __init__(self, plan: Plan, shop: Workshop, timer: StepTimer | None) -> None:
        self.plan = plan
        self.shop = shop
        self.stopped: Literal["", "budget", "interrupted"] = ""
        sizes = program_bytes(plan)
        self.contests: list[Contest] = []
        for task in all_tasks(plan):
            largest = max((sizes[site.program] for site in task.sites), default=0)
            self.contests.append(Contest(task, policy_for(shop.target, largest), shop))
        self.own = {task.key for task in plan.tasks}
        self.order = sorted(self.contests, key=lambda c: -c.planned.weight * call_us(c.planned, shop.target))
        self._put_rivals_last()
        self.steps = None if timer is None else Steps(shop, timer)
        self.guard = Guard(plan, shop)
        self.guard.attend(self.contests)
        self.whole: WholeProgram | None = None
        self.launch_forms: LaunchForms | None = None

    def _put_rivals_last(self) -> None:
        """Race what only another grouping has when everything else was: whatever ends the run costs that first."""
        self.order.sort(key=lambda contest: contest.planned.key not in self.own)

    def run(self) -> Tuning:
        shop = self.shop
        self._announce()
        if shop.budget.is_limited:
            self._survey()
        for index in range(len(self.order)):
            self._race(index)
        if shop.budget.is_limited:
            self._go_on()
        self._choose_grouping()
        self.guard.attend(self.contests)
        finals = {contest.planned.key: finalists_of(contest) for contest in self.contests}
        bound = {contest.planned.key: contest for contest in self.contests if is_bound(contest.planned.task)}
        # A bound task's weight stays as it is, and what its own race found does not count.
        open_finals = {key: final[:1] if key in bound else final for key, final in finals.items()}
        settlement = self.guard.settle(open_finals, may_measure=self.stopped != "interrupted")
        if bound and not self.stopped:
            settlement = self._bind(settlement, bound)
        elif not self.stopped:
            settlement = self._time_steps(settlement, open_finals)
        if self.guard.cut_short and self.guard.unconfirmed and not self.stopped:
            self.stopped = "interrupted" if shop.stop.is_set() else "budget"
        shop.stop.clear()
        shop.is_assembling = True
        code: dict[str, bytes] = {}
        judges = [judge for judge in (self.whole, self.launch_forms) if judge is not None]
        assembly = Assembly(self.guard, judges)
        choices: list[Choice] = []
        for contest in self.contests:
            choice, machine_code = assembly.choose(contest, settlement)
            choices.append(choice)
            code |= machine_code
        seconds = shop.budget.spent_s
        shop.report(TuneFinished(shop.builds, shop.measured, seconds, self.stopped, shop.repeated))
        return Tuning(
            plan=settlement.plan,
            target=shop.target,
            choices=tuple(choices),
            code=dict(sorted(code.items())),
            builds=shop.builds,
            measured=shop.measured,
            seconds=seconds,
            stopped=self.stopped,
            repeated=shop.repeated,
            steps=() if self.whole is None else self.whole.steps,
        )

    def _choose_grouping(self) -> None:
        """Go on with one grouping of the programs, and the races of its tasks."""
        finals = {
            contest.planned.key: finalists_of(contest)
            for contest in self.contests
            if contest.outcome is not None
            and contest.complete
            and not contest.outcome.failed
            and not finalists_of(contest)[0].doubtful
        }
        self.plan = choose_grouping(self.plan, finals)
        by_key = {contest.planned.key: contest for contest in self.contests}
        self.contests = [by_key[task.key] for task in self.plan.tasks]
        for contest, task in zip(self.contests, self.plan.tasks, strict=True):
            contest.planned = task  # the same task, with this plan's weight and sites
        self.guard = Guard(self.plan, self.shop)
        if self.steps is not None:
            self.steps.attend(self.contests)
            self.whole = WholeProgram(self.plan, self.shop, self.steps)
            self.launch_forms = LaunchForms(self.shop, self.steps)

    def _bind(self, settlement: Settlement, bound: Mapping[str, Contest]) -> Settlement:
        """Give the tasks that must be invariant one candidate per form, which is right on other inputs too.

        A form of which a task could not be measured again keeps the extern, as all that is unconfirmed does.
        """
        while True:
            entries = {key: RaceTimes(self._held_us(contest), contest.refused) for key, contest in bound.items()}
            chosen: dict[str, Finalist] = {}
            for key, candidate in settle_invariant(self.plan, entries).items():
                us = entries[key].times_us[candidate]
                gain = settlement.winners[key].median_us / us
                chosen[key] = Finalist(candidate, (), us, gain, gain, gain, 1, unconditional=False)
            if self.guard.review(chosen, settlement.winners):
                break
        held = served_at_every_size(self.plan, chosen.keys() - self.guard.unconfirmed)
        self.guard.unconfirmed |= chosen.keys() - held
        winners = {key: chosen[key] if key in held else winner for key, winner in settlement.winners.items()}
        return msgspec.structs.replace(settlement, winners=winners)

    def _held_us(self, contest: Contest) -> dict[Candidate, float]:
        """Return the times of a race's candidates but for those that failed when they were measured again."""
        key, found = contest.planned.key, self.guard.confirmation
        return {
            candidate: us
            for candidate, us in contest.times_us().items()
            if (known := found(key, candidate)) is None or not known.failed
        }

    def _time_steps(self, settlement: Settlement, finals: Mapping[str, Sequence[Finalist]]) -> Settlement:
        """Time whole programs: leave out the choices that make one slower, then let kernels start as suits the step."""
        if self.steps is None or self.whole is None or self.launch_forms is None:
            return settlement
        self.shop.device.close()  # a model as a whole needs the memory, and so do tasks
        while not self.whole.examine(settlement):
            self.steps.close()
            out = {key: self.whole.dropped(key) for key in finals}
            left = {key: [f for f in final if f.candidate not in out[key]] for key, final in finals.items()}
            settlement = self.guard.settle(left, may_measure=self.stopped != "interrupted")
            self.shop.device.close()
        settlement = self._turn(settlement, finals, self.whole, self.launch_forms, self.steps)
        if self.steps.cut_short and not self.stopped:
            self.stopped = "interrupted" if self.shop.stop.is_set() else "budget"
        return settlement

    def _turn(
        self,
        settlement: Settlement,
        finals: Mapping[str, Sequence[Finalist]],
        whole: WholeProgram,
        launch_forms: LaunchForms,
        steps: Steps,
    ) -> Settlement:
        """Give winners the forms with which steps are faster, as far as these hold beside the extern."""
        lost: set[tuple[str, Candidate]] = set()
        while turns := launch_forms.turn(settlement, lost):
            steps.close()
            forms = {key: form for turn in turns for key, form in turn.forms.items()}
            self.guard.review(forms, {key: finals[key][0] for key in forms})
            self.shop.device.close()
            new = {(key, form.candidate) for key, form in forms.items() if not self.guard.holds(key, form.candidate)}
            if not new:
                launch_forms.take(turns)
                settlement = msgspec.structs.replace(settlement, winners={**settlement.winners, **forms})
                whole.refresh(settlement, forms)
                break
            lost |= new
        return settlement

    def _announce(self) -> None:
        shop = self.shop
        if shop.records.moved_to is not None:
            shop.report(RecordsDamaged(str(shop.records.moved_to), shop.records.rescued))
        open_contests = [contest for contest in self.contests if contest.outcome is None]
        candidates = sum(contest.expected for contest in open_contests)
        stale = sum(contest.stale is not None for contest in open_contests)
        seconds = estimate_seconds(shop.target, len(open_contests), candidates, shop.options.build_workers)
        total = sum(contest.expected for contest in self.contests)
        replayed = len(self.contests) - len(open_contests)
        shop.report(TuneStarted(len(self.contests), total, replayed, seconds if open_contests else 0.0, stale))

    def _survey(self) -> None:
        """With little time, know first where it is worth most: put the races in the order of weight x possible gain."""
        shop = self.shop
        unknown = [contest for contest in self.order if contest.outcome is None and contest.trials.extern_us is None]
        if survey_seconds(shop.target, len(unknown)) <= _SURVEY_PART * shop.budget.seconds:
            for contest in unknown:
                if shop.out_of_time:
                    break
                try:
                    contest.survey()
                except InterruptedRaceError:
                    self.stopped = "interrupted"
                    break
        self.order.sort(key=lambda contest: -self._worth(contest))
        self._put_rivals_last()

    def _worth(self, contest: Contest) -> float:
        """Return weight x possible gain; what is near its floor is worth little, but not nothing."""
        planned, target = contest.planned, self.shop.target
        us = contest.trials.extern_us or call_us(planned, target)
        return planned.weight * max(us - floor_us(planned, target), _LEAST_GAIN * us)

    def _go_on(self) -> None:
        """Give what is left of the search's time to the races whose share did not suffice."""
        shop = self.shop
        while not self.stopped and not shop.budget.is_searched_out:
            cut = [index for index, contest in enumerate(self.order) if not contest.complete]
            before = shop.measured
            for index in cut:
                contest = self.order[index]
                again = Contest(contest.planned, contest.policy, shop)
                self.order[index] = again
                self.contests[self.contests.index(contest)] = again
                self._race(index)
            if shop.measured == before:
                break
        own = [contest for contest in self.contests if contest.planned.key in self.own]
        unfinished = any(contest.outcome is None or not contest.complete for contest in own)
        if unfinished and not self.stopped:
            self.stopped = "budget"

    def _race(self, index: int) -> None:
        """Run one race unless its outcome is known or the run has to stop."""
        shop = self.shop
        contest = self.order[index]
        planned = contest.planned
        started = time.monotonic()
        shop.report(TaskStarted(index, planned.key, planned.label, contest.expected))
        replayed = contest.outcome is not None
        if not replayed and not self.stopped and not shop.budget.is_searched_out:
            rest = sum(self._worth(other) for other in self.order[index:] if other.outcome is None)
            shop.budget.allot(self._worth(contest), rest)
            self._feed(index)
            try:
                contest.run()
            except InterruptedRaceError:
                self.stopped = "interrupted"
        best = select_winner(finalists_of(contest))
        known = best.candidate == contest.baseline or self.guard.confirmation(planned.key, best.candidate) is not None
        shop.budget.note_winner(planned.key, is_confirmed=known)
        baseline_us = finalists_of(contest)[0].median_us
        seconds = time.monotonic() - started
        status = status_of(contest, best)
        shop.report(
            TaskDone(index, planned.key, best.candidate, best.median_us, baseline_us, seconds, replayed, status)
        )

    def _feed(self, index: int) -> None:
        """Queue builds of the races to come: no build process idles, and a CPU builds for several tasks at a time."""
        if self.shop.budget.is_limited and not self.shop.overlap:
            return  # each race pays for its own builds
        for contest in self.order[index:]:
            if contest.outcome is None:
                contest.prefetch()
            if self.shop.pool.queued >= _AHEAD * self.shop.options.build_workers:
                return
