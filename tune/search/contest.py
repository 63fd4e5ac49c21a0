"""One task: from its candidates to the outcome of its final, using what the records and the store already hold.

1. The families that accept the task list their configurations.
2. Builds are taken from the store or run in the pool.
3. Each candidate is checked against the reference, then timed briefly; a list is raced, a reduction's or pointwise
   kernel's configurations are climbed, and so are the whole spaces around the best matmuls of a list.
4. The finalists and the extern are timed interleaved; the outcome is recorded.
"""

import functools
import logging
import math
from collections.abc import Sequence

from tune_model.extract.task import PlannedTask
from tune_model.tune.building.builds import Builds
from tune_model.tune.candidate import TRANSIENT_REASONS, Built, Candidate, Config, Effort, Family, Rejected
from tune_model.tune.device import Bench, Samples
from tune_model.tune.events import CandidateDone
from tune_model.tune.measuring.interval import paired_ratio, percentile
from tune_model.tune.measuring.policy import Policy
from tune_model.tune.records.database import Body, Finalist, Outcome, Refusal, Timing
from tune_model.tune.records.facts import Trail
from tune_model.tune.records.identity import kindred_key, measurement_key, race_key
from tune_model.tune.search.descent import descend, expected_count, is_climbed, neighbours, rules_for
from tune_model.tune.search.invariance import refuse_variant
from tune_model.tune.search.race import RaceRules, race
from tune_model.tune.search.refinement import Refinement
from tune_model.tune.workshop import AbandonedRaceError, InterruptedRaceError, Workshop

__all__ = ["Contest"]

logger = logging.getLogger(__name__)

_FINAL_RUNG = 100
_GUARD_RUNG = 200
"""Finals and the guard's times are told from a race's rungs by these numbers in the records."""

_REPEATS = 3
"""Of a final that other processes disturb; one that merely drifts is repeated once."""


class Contest:
    """The race for one task.

    Attributes:
        planned: The task.
        protocol: How it is measured, and by which code.
        baseline: The extern as a candidate.
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
        self.protocol = f"{policy.key} by {shop.workbench}"
        self.key = race_key(sources, planned.key, shop.target_key, self.protocol, shop.options.effort)
        self.kindred = kindred_key(sources, planned.key, shop.target, policy.family, shop.options.effort)
        self.outcome = None if shop.options.recheck else shop.records.outcome(self.key)
        self.stale = self._find_stale()
        self.complete = True
        self.builds = Builds(planned, self.baseline, shop, self._is_known)
        self._errors: dict[Candidate, float] = {}
        self._times: dict[Candidate, float] = {}
        self._asked: dict[tuple[Candidate, int], float | None] = {}
        self._open = False

    @functools.cache  # noqa: B019 (a contest lives as long as its run)
    def key_of(self, candidate: Candidate) -> str:
        """Return a candidate's measurement key."""
        source = self.shop.source(self.shop.family(candidate))
        return measurement_key(source, self.planned.key, candidate, self.shop.target, self.protocol)

    @property
    def seed(self) -> int:
        """Of the task's random inputs."""
        return self.shop.options.seed ^ int(self.planned.key[:12], 16)

    def times_us(self) -> dict[Candidate, float]:
        """Return the median of every candidate's longest timing in the records, but for what the guard measured."""
        best: dict[Candidate, Timing] = {}
        for row in self.rows():
            if isinstance(row, Timing) and row.rung < _GUARD_RUNG and row.rung >= best.get(row.candidate, row).rung:
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
        return sum(expected_count(kind, len(configs), builds_ahead=ahead) for configs in self.spaces.values())

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

    def _is_known(self, candidate: Candidate) -> bool:
        """Say whether the records make a build needless for now: it is out, or its first time is there."""
        if self.shop.options.recheck:
            return False
        known = self.shop.records.timing(self.key_of(candidate), 0)
        return known is not None or self._refusal(candidate) is not None

    def _refusal(self, candidate: Candidate) -> Rejected | None:
        """Return why a candidate is out: for this run, or by what earlier ones recorded."""
        key = self.key_of(candidate)
        return self.shop.refused.get(key) or self.shop.records.refusal(key)

    def time(self, candidate: Candidate, rung: int) -> float | None:
        """Time a candidate, or take its time from the records (`race.Timer`); asked twice, it answers the same."""
        if (candidate, rung) not in self._asked:
            self._asked[candidate, rung] = self._time(candidate, rung)
        return self._asked[candidate, rung]

    def _time(self, candidate: Candidate, rung: int) -> float | None:
        self._mind_interruption()
        key = self.key_of(candidate)
        if not self.shop.options.recheck:
            refused = self._refusal(candidate)
            if refused is not None:
                self._report(candidate, 0.0, rejected=refused, replayed=True)
                return None
            known = self.shop.records.timing(key, rung)
            if known is not None:
                self._errors.setdefault(candidate, known.error)
                self._times[candidate] = known.median_us
                self._report(candidate, known.median_us, replayed=True)
                return known.median_us
        if self.shop.out_of_time and candidate != self.baseline:
            return self._times.get(candidate)
        samples = self._measure(candidate, rung)
        if isinstance(samples, Rejected):
            _mind_abandonment(samples)
            if candidate == self.baseline:
                raise _UnmeasurableError(samples)
            self.refuse(candidate, samples)
            return None
        self._write(candidate, samples, rung, "race")
        self._report(candidate, self._times[candidate])
        return self._times[candidate]

    def _measure(self, candidate: Candidate, rung: int) -> Samples | Rejected:
        built = self.builds.obtain(candidate)
        if isinstance(built, Rejected):
            return built
        checked = self._check(candidate, built)
        if isinstance(checked, Rejected):
            return checked
        length = self.policy.rungs[min(rung, len(self.policy.rungs) - 1)]
        samples = self.shop.device.time(candidate, built, length)
        if isinstance(samples, Samples) and samples.doubtful and self.shop.pause():
            self.shop.repeated += 1
            samples = self.shop.device.time(candidate, built, length)
        return samples

    def _check(self, candidate: Candidate, built: Built) -> Rejected | None:
        self._ensure_open()
        if candidate == self.baseline:
            return None
        if candidate not in self._errors or self.shop.options.recheck:
            checked = self.shop.device.check(candidate, built)
            if isinstance(checked, Rejected):
                return checked
            self._errors[candidate] = checked.error
        return None

    def _ensure_open(self) -> None:
        """Put the task on the device before the first thing that needs it."""
        if self._open:
            return
        baseline = self.builds.obtain(self.baseline)
        if isinstance(baseline, Rejected):
            raise _UnmeasurableError(baseline)
        began = self.shop.budget.spent_s
        opened = self.shop.device.open(Bench(self.planned.task, self.policy, baseline, self.seed))
        self.shop.budget.note_open(self.shop.budget.spent_s - began)
        if isinstance(opened, Rejected):
            _mind_abandonment(opened)
            raise _UnmeasurableError(opened)
        self._errors[self.baseline] = opened.error
        self._open = True

    def _write(self, candidate: Candidate, samples: Samples, rung: int, stage: str) -> None:
        us = samples.us
        timing = Timing(
            candidate,
            rung,
            stage,
            percentile(us, 0.5),
            percentile(us, 0.2),
            percentile(us, 0.8),
            len(us),
            self._errors.get(candidate, 0.0),
            samples.disturbed,
        )
        self.shop.records.add(self.key_of(candidate), self.planned.key, timing)
        self.shop.measured += 1
        self._times[candidate] = timing.median_us

    def write_guard(self, candidate: Candidate, samples: Samples, error: float) -> None:
        """Record the times of a winner, or of the extern beside it, that was measured again."""
        self._errors[candidate] = error
        self._write(candidate, samples, _GUARD_RUNG, "guard")

    def refuse(self, candidate: Candidate, rejected: Rejected) -> None:
        """Take a candidate out of this run's races, and of later ones unless the reason may pass."""
        self.shop.refused[self.key_of(candidate)] = rejected
        self.shop.records.add(self.key_of(candidate), self.planned.key, Refusal(candidate, rejected))
        self._report(candidate, 0.0, rejected=rejected)

    def _report(
        self, candidate: Candidate, time_us: float, *, rejected: Rejected | None = None, replayed: bool = False
    ) -> None:
        best_us = min(self._times.values(), default=0.0)
        baseline_us = self._times.get(self.baseline, 0.0)
        event = CandidateDone(self.planned.key, candidate, time_us, best_us, baseline_us, replayed, rejected)
        self.shop.report(event)

    def _mind_interruption(self) -> None:
        if self.shop.stop.is_set():
            raise InterruptedRaceError

    def survey(self) -> None:
        """Time the extern alone, to know what there is to gain."""
        try:
            self._ensure_open()
            self.time(self.baseline, 0)
        except (AbandonedRaceError, _UnmeasurableError):
            pass  # the race itself says so, if it comes to that
        finally:
            self._close()

    @property
    def extern_us(self) -> float | None:
        """The extern's time, as far as the records know it."""
        known = self.shop.records.timing(self.key_of(self.baseline), 0)
        return None if known is None else known.median_us

    def run(self) -> None:
        """Race the candidates and record the outcome.

        Raises:
            InterruptedRaceError: The user asked to stop.
        """
        try:
            self.outcome = self._run()
        except AbandonedRaceError:
            self.complete = False
            self._mind_interruption()
        except _UnmeasurableError as error:
            self.outcome = Outcome((), f"{error.rejected.reason}: {error.rejected.detail}")
            if not error.may_pass:
                self.shop.records.add(self.key, self.planned.key, self.outcome)
        finally:
            self._close()

    def _close(self) -> None:
        self.builds.drop()
        if self._open:
            self.shop.device.finish()
            self._open = False

    def _run(self) -> Outcome | None:
        """Return the outcome; `None` when time was up before anything could compete with the extern."""
        self.prefetch()
        self._ensure_open()
        if not self.shop.overlap:
            self.builds.settle()
        if self.stale is not None:
            outcome = self._final(self._stale_finalists())
            if len(outcome.finalists) == len(self.stale.finalists):
                return self._keep(outcome)
            self.stale = None  # not all of them work here: this machine has to find its own
            self.prefetch()
            if not self.shop.overlap:
                self.builds.settle()
        if self.time(self.baseline, 0) is None:
            refused = self._refusal(self.baseline)
            raise _UnmeasurableError(refused or Rejected("launch", "the baseline cannot be timed"))
        rivals: list[Candidate] = []
        for name, configs in self.spaces.items():
            # The few best of a descent meet the listed candidates in the race.
            entering = self._descend(name)[:3] if self._descends(name) else configs
            rivals += [c for config in entering if (c := Candidate(name, config)) != self.baseline]
        # One brief timing on a CPU that others share may be far off: only the truly slow are out at once.
        # On a GPU whose clocks follow its power, candidates timed a second apart differ by some percent.
        finalists = 3 if self.shop.options.effort is Effort.QUICK else 8 if self.shop.overlap else 5
        rules = RaceRules(finalists, hopeless=1.5 if self.shop.overlap else 3.0)
        last = [c for c in race(self.builds.as_ready(rivals), self, rules, self._layouts_of) if c != self.baseline]
        if self.refinement.is_due:
            last += [c for c in self._refine(last) if c not in last and c != self.baseline]
        self.complete = not self.shop.out_of_time
        if self.complete:
            return self._keep(self._final(last))
        return self._final(last) if last else None

    def _keep(self, outcome: Outcome) -> Outcome:
        """Record an outcome, also for machines on which it will be stale."""
        for key in (self.key, self.kindred):
            self.shop.records.add(key, self.planned.key, outcome)
        return outcome

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
            return self.time(Candidate(name, config), 0)

        rules = rules_for(self.shop.options.effort, builds_ahead=self.shop.overlap)
        found, footprints = descend(self._start(name), self.spaces[name], time, announce, rules)
        if not self.shop.out_of_time:
            trail = Trail(Candidate(name), footprints)
            self.shop.records.add(self.key_of(trail.candidate), self.planned.key, trail)
        return found

    def _refine(self, last: Sequence[Candidate]) -> list[Candidate]:
        times = {c: self._times[c] for c in (self.baseline, *last) if c in self._times}
        # Behind the builds of the races to come, a neighbourhood would be built one by one as it is asked for.
        announce = functools.partial(self.builds.request, urgent=True)
        best, trails = self.refinement.climb(times, lambda c: self.time(c, 1), announce)
        if not self.shop.out_of_time:
            for trail in trails:
                self.shop.records.add(self.key_of(trail.candidate), self.planned.key, trail)
        return best

    def _layouts_of(self, candidate: Candidate) -> tuple[tuple[str, str], ...]:
        built = self.builds.obtain(candidate)
        return built.kernel.layouts if isinstance(built, Built) else ()

    def _final(self, finalists: list[Candidate]) -> Outcome:
        """Time the finalists interleaved with the extern; one that fails is out, and the rest go again.

        Raises:
            _UnmeasurableError: The extern fails; its task has been measured before, so this is no property of it.
        """
        field = [self.baseline, *finalists]
        repeats = 0
        began = self.shop.budget.spent_s
        while True:
            self._mind_interruption()
            entries = self._entries(field)
            results = self.shop.device.compare(tuple(entries), self.policy.final)
            if isinstance(results, Rejected):
                _mind_abandonment(results)
                field = self._smaller_field(entries, results)
                continue
            failed = {c: r for (c, _), r in zip(entries, results, strict=True) if isinstance(r, Rejected)}
            for rejected in failed.values():
                _mind_abandonment(rejected)
            if self.baseline in failed:
                raise _UnmeasurableError(failed[self.baseline], may_pass=True)
            if failed:
                for candidate, rejected in failed.items():
                    self.refuse(candidate, rejected)
                field = [c for c in field if c not in failed]
                continue
            samples = {c: r for (c, _), r in zip(entries, results, strict=True) if isinstance(r, Samples)}
            if repeats < _REPEATS and any(found.disturbed for found in samples.values()):
                doubtful = any(found.doubtful for found in samples.values())
                repeats += 1 if doubtful else _REPEATS
                if not doubtful or self.shop.pause():
                    self.shop.repeated += 1
                    continue
            self.shop.budget.note_final(self.shop.budget.spent_s - began, len(field))
            return self._outcome(entries, samples)

    def _smaller_field(self, entries: Sequence[tuple[Candidate, Built]], rejected: Rejected) -> list[Candidate]:
        """Return the extern and the faster half of the others, which fail together though none of them does alone.

        The last one left is out: the extern has been timed without it.

        Raises:
            _UnmeasurableError: There is no other.
        """
        rivals = sorted((c for c, _ in entries[1:]), key=lambda c: self._times.get(c, math.inf))
        if not rivals:
            raise _UnmeasurableError(rejected, may_pass=True)
        if len(rivals) == 1:
            self.refuse(rivals[0], rejected)
        kept = rivals[: len(rivals) // 2]
        text = f"{rejected.reason}: {rejected.detail}"
        logger.warning("%s: %d finalists fail, none of them alone (%s)", self.planned.label, len(rivals), text)
        return [self.baseline, *kept]

    def _entries(self, field: Sequence[Candidate]) -> list[tuple[Candidate, Built]]:
        """Return those of the field that are built and right."""
        entries: list[tuple[Candidate, Built]] = []
        for candidate in field:
            built = self.builds.obtain(candidate)
            problem = built if isinstance(built, Rejected) else self._check(candidate, built)
            if problem is not None:
                _mind_abandonment(problem)
                self.refuse(candidate, problem)
            elif isinstance(built, Built):
                entries.append((candidate, built))
        return entries

    def _outcome(self, entries: list[tuple[Candidate, Built]], samples: dict[Candidate, Samples]) -> Outcome:
        extern = samples[self.baseline]
        finalists: list[Finalist] = []
        for candidate, built in entries:
            self._write(candidate, samples[candidate], _FINAL_RUNG, "final")
            gain = paired_ratio(extern.us, samples[candidate].us)
            kernel = built.kernel
            finalists.append(
                Finalist(
                    candidate,
                    kernel.layouts,
                    percentile(samples[candidate].us, 0.5),
                    gain.median,
                    gain.low,
                    gain.high,
                    len(kernel.steps) + len(kernel.workspaces),
                    not kernel.requires,
                    samples[candidate].doubtful,
                )
            )
        return Outcome((finalists[0], *sorted(finalists[1:], key=lambda f: -f.gain)))


def _mind_abandonment(rejected: Rejected) -> None:
    """Tell a measurement that was given up because the run has to end from a candidate that failed."""
    if rejected.reason == "abandoned":
        raise AbandonedRaceError


class _UnmeasurableError(Exception):
    """The task itself cannot be measured here; its outcome says why, and is recorded unless that may pass."""

    def __init__(self, rejected: Rejected, *, may_pass: bool = False) -> None:
        super().__init__(rejected.detail)
        self.rejected = rejected
        self.may_pass = may_pass or rejected.reason in TRANSIENT_REASONS
