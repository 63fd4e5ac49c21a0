"""One task: from its candidates to the outcome of its final, using what the records and the store already hold.

1. The families that accept the task list their configurations.
2. Builds are taken from the store or run in the pool.
3. Each candidate is checked against the reference, then timed briefly (`trials`); a list is raced, a reduction's or
   pointwise kernel's configurations are climbed, and so are the whole spaces around the best matmuls of a list.
4. The finalists and the extern are timed interleaved (`final`); the outcome is recorded.
"""

import functools
from collections.abc import Sequence

from tune_model.extract.task import PlannedTask
from tune_model.tune.candidate import Built, Candidate, Config, Effort, Family, Rejected
from tune_model.tune.estimate import is_hot
from tune_model.tune.measuring.policy import Policy
from tune_model.tune.records.database import Body, Outcome, Refusal, Timing
from tune_model.tune.records.facts import Trail
from tune_model.tune.records.identity import kindred_key, race_key
from tune_model.tune.search.descent import descend, expected_climbs, expected_count, is_climbed, neighbours, rules_for
from tune_model.tune.search.final import hold_final, hold_heat
from tune_model.tune.search.invariance import refuse_variant
from tune_model.tune.search.race import RaceRules, race
from tune_model.tune.search.refinement import Refinement
from tune_model.tune.search.trials import CLIMB_RUNG, GUARD_RUNG, Trials, UnmeasurableError
from tune_model.tune.workshop import AbandonedRaceError, Workshop

__all__ = ["Contest"]

_FEWEST = 3
"""Finalists of a quick search."""

_HEAT = 24


class Contest:
    """The race for one task.

    Attributes:
        planned: The task.
        baseline: The extern as a candidate.
        trials: Its candidates on the device.
        builds: They as machine code.
        candidates: All that compete, the baseline first.
        refused: Families that do not accept the task, and why.
        outcome: As recorded by an earlier run, else `None` until `run`.
        stale: Without an outcome, that of a machine that differs only in what must match to stay optimal.
        complete: The whole list was raced; not so when the budget ran out meanwhile.
    """

    def __init__(self, planned: PlannedTask, policy: Policy, shop: Workshop) -> None:
        """List the candidates; nothing is built."""
        self.planned = planned
        self.policy = policy
        self.shop = shop
        task, target = planned.task, shop.target
        self.refused: list[tuple[Candidate, Rejected]] = []
        self.spaces: dict[str, tuple[Config, ...]] = {}
        accepting: list[Family] = []
        for family in shop.families:
            if task.form.kind not in family.kinds:
                continue
            variant = None if family is shop.families[0] else refuse_variant(task, family.name)
            reason = variant or family.accepts(task, target)
            if reason is not None:
                self.refused.append((Candidate(family.name), reason))
                continue
            accepting.append(family)
            configs = tuple(dict.fromkeys(family.configurations(task, target, shop.options.effort)))
            self.spaces[family.name] = configs
        self.refinement = Refinement(planned, shop, self.spaces)
        self.baseline = Candidate(shop.families[0].name, shop.families[0].start(task, target))
        listed = (Candidate(name, config) for name, configs in self.spaces.items() for config in configs)
        self.candidates = tuple(dict.fromkeys((self.baseline, *listed)))
        sources = tuple(shop.source(family) for family in accepting)
        self.trials = Trials(planned, policy, self.baseline, shop)
        self.builds = self.trials.builds
        self.key_of = self.trials.key_of
        self.key = race_key(sources, planned.key, shop.target_key, self.trials.protocol, shop.options.effort)
        self.kindred = kindred_key(sources, planned.key, shop.target, policy.family, shop.options.effort)
        self.outcome = None if shop.options.recheck else shop.records.outcome(self.key)
        self.stale = self._find_stale()
        self.complete = True

    def times_us(self) -> dict[Candidate, float]:
        """Return the median of every candidate's longest timing in the records, but for what the guard measured."""
        best: dict[Candidate, Timing] = {}
        for row in self.rows():
            if isinstance(row, Timing) and row.rung < GUARD_RUNG and row.rung >= best.get(row.candidate, row).rung:
                best[row.candidate] = row
        refused = self.refusals()
        return {candidate: row.median_us for candidate, row in best.items() if candidate not in refused}

    def refusals(self) -> dict[Candidate, Rejected]:
        """Return who is out by the records, and why; one that was timed after it was refused is not."""
        found: dict[Candidate, Rejected] = {}
        for row in self.rows():
            if isinstance(row, Refusal):
                found[row.candidate] = row.rejected
            elif isinstance(row, Timing):
                found.pop(row.candidate, None)
        return found

    def rows(self) -> tuple[Body, ...]:
        """Return everything the records say about this contest's candidates."""
        trails = [Candidate(name) for name in self.spaces]
        found = self.shop.records.of_keys(self.planned.key, frozenset(map(self.key_of, trails)))
        tried = [
            Candidate(trail.candidate.family, entry.config)
            for trail in found
            if isinstance(trail, Trail)
            for footprint in trail.footprints
            for entry in (footprint.at, *footprint.tried)
        ]
        keys = frozenset(map(self.key_of, (*self.candidates, *trails, *tried)))
        return self.shop.records.of_keys(self.planned.key, keys)

    @property
    def expected(self) -> int:
        """About how many candidates will be timed: of a space that is climbed, a part."""
        if self.stale is not None:
            return len(self.field)
        kind, ahead = self.planned.task.form.kind, self.shop.overlap
        listed = sum(expected_count(kind, len(configs), builds_ahead=ahead) for configs in self.spaces.values())
        return listed + expected_climbs(kind, self.shop.options.effort, builds_ahead=ahead)

    @property
    def field(self) -> tuple[Candidate, ...]:
        """What is going to be raced: all candidates, or of a stale outcome its finalists."""
        return self.candidates if self.stale is None else (self.baseline, *self._stale_finalists())

    def _find_stale(self) -> Outcome | None:
        if self.outcome is not None or self.shop.options.recheck:
            return None
        found = self.shop.records.outcome(self.kindred)
        if found is None or not found.finalists:
            return None
        known = frozenset(self.candidates)
        # Elsewhere the families may offer other configurations: then the old outcome says nothing.
        offered = all(f.candidate in known or self.refinement.offers(f.candidate) for f in found.finalists)
        return found if offered else None

    def _stale_finalists(self) -> list[Candidate]:
        return [] if self.stale is None else [finalist.candidate for finalist in self.stale.finalists[1:]]

    def prefetch(self) -> None:
        """Queue the builds that the race will ask for first."""
        if self.stale is not None:
            self.builds.request(self._stale_finalists())
            return
        for name, configs in self.spaces.items():
            first: Sequence[Config] = configs
            if self._descends(name):
                start = self._start(name)
                first = (start, *neighbours(start, configs))
            self.builds.request([Candidate(name, config) for config in first])

    def survey(self) -> None:
        """Time the extern alone, to know what there is to gain."""
        try:
            self.trials.open()
            self.trials.time(self.baseline, 0)
        except (AbandonedRaceError, UnmeasurableError):
            pass  # the race itself says so, if it comes to that
        finally:
            self.trials.close()

    def run(self) -> None:
        """Race the candidates and record the outcome.

        Raises:
            InterruptedRaceError: The user asked to stop.
        """
        try:
            self.outcome = self._run()
        except AbandonedRaceError:
            self.complete = False
            self.trials.mind_interruption()
        except UnmeasurableError as error:
            self.outcome = Outcome((), f"{error.rejected.reason}: {error.rejected.detail}")
            if not error.may_pass:
                self.shop.records.add(self.key, self.planned.key, self.outcome)
        finally:
            self.trials.close()

    def _run(self) -> Outcome | None:
        """Return the outcome; `None` when time was up before anything could compete with the extern."""
        self.prefetch()
        self.trials.open()
        if not self.shop.overlap:
            self.builds.settle()
        if self.stale is not None:
            outcome = hold_final(self.trials, self._stale_finalists())
            if len(outcome.finalists) == len(self.stale.finalists):
                return self._keep(outcome)
            self.stale = None  # not all of them work here: this machine has to find its own
            self.prefetch()
            if not self.shop.overlap:
                self.builds.settle()
        if self.trials.time(self.baseline, 0) is None:
            refused = self.trials.refusal(self.baseline)
            raise UnmeasurableError(refused or Rejected("launch", "the baseline cannot be timed"))
        rivals: list[Candidate] = []
        for name, configs in self.spaces.items():
            # The few best of a descent meet the listed candidates in the race.
            entering = self._descend(name)[:3] if self._descends(name) else configs
            rivals += [c for config in entering if (c := Candidate(name, config)) != self.baseline]
        # One brief timing on a CPU that others share may be far off: only the truly slow are out at once.
        # On a GPU whose clocks follow its power, candidates timed a second apart differ by some percent.
        finalists = _FEWEST if self.shop.options.effort is Effort.QUICK else 8 if self.shop.overlap else 5
        heat = _HEAT if finalists > _FEWEST and self._is_hot() else 0
        rules = RaceRules(finalists, hopeless=1.5 if self.shop.overlap else 3.0, heat=heat)
        meet = functools.partial(hold_heat, self.trials)
        ready = self.builds.as_ready(rivals)
        last = [c for c in race(ready, self.trials, rules, self._layouts_of, meet) if c != self.baseline]
        if self.refinement.is_due:
            last += [c for c in self._refine(last) if c not in last and c != self.baseline]
        self.complete = not self.shop.out_of_time
        if self.complete:
            return self._keep(hold_final(self.trials, last))
        return hold_final(self.trials, last) if last else None

    def _keep(self, outcome: Outcome) -> Outcome:
        """Record an outcome, also for machines on which it will be stale."""
        for key in (self.key, self.kindred):
            self.shop.records.add(key, self.planned.key, outcome)
        return outcome

    def _is_hot(self) -> bool:
        """Say whether a GPU's power decides: a matmul of many rows. Invariant kernels are compared between tasks."""
        task = self.planned.task
        if not self.shop.overlap or task.form.kind != "matmul" or task.rules.batch_invariant:
            return False
        return is_hot(self.planned)

    def _descends(self, name: str) -> bool:
        return is_climbed(self.planned.task.form.kind, len(self.spaces[name]), builds_ahead=self.shop.overlap)

    def _start(self, name: str) -> Config:
        start = self.shop.family(Candidate(name)).start(self.planned.task, self.shop.target)
        return start if start in self.spaces[name] else self.spaces[name][0]

    def _descend(self, name: str) -> list[Config]:
        def announce(configs: Sequence[Config]) -> None:
            self.builds.request([Candidate(name, config) for config in configs], urgent=True)
            if not self.shop.overlap:
                self.builds.settle()

        def time(config: Config) -> float | None:
            return self.trials.time(Candidate(name, config), 0)

        rules = rules_for(self.shop.options.effort, builds_ahead=self.shop.overlap)
        found, footprints = descend(self._start(name), self.spaces[name], time, announce, rules)
        if not self.shop.out_of_time:
            trail = Trail(Candidate(name), footprints)
            self.shop.records.add(self.key_of(trail.candidate), self.planned.key, trail)
        return found

    def _refine(self, last: Sequence[Candidate]) -> list[Candidate]:
        times = {c: self.trials.times[c] for c in (self.baseline, *last) if c in self.trials.times}
        # Behind the builds of the races to come, a neighbourhood would be built one by one as it is asked for.
        announce = functools.partial(self.builds.request, urgent=True)
        # Where a climb begins is timed again: what the race saw of it met a cooler GPU than its neighbours do now.
        best, trails = self.refinement.climb(times, lambda c: self.trials.time(c, CLIMB_RUNG), announce)
        if not self.shop.out_of_time:
            for trail in trails:
                self.shop.records.add(self.key_of(trail.candidate), self.planned.key, trail)
        return best

    def _layouts_of(self, candidate: Candidate) -> tuple[tuple[str, str], ...]:
        built = self.builds.obtain(candidate)
        return built.kernel.layouts if isinstance(built, Built) else ()
