"""A task's candidates on the device, one by one: checked against the reference, timed, or refused.

What the records and the store already hold is taken from there; every fact is recorded before the next is asked for.
Who competes with whom is decided in `contest`.
"""

from tune_model.extract.task import PlannedTask
from tune_model.tune.building.builds import Builds
from tune_model.tune.candidate import TRANSIENT_REASONS, Built, Candidate, Rejected
from tune_model.tune.device import Bench, Samples
from tune_model.tune.events import CandidateDone
from tune_model.tune.measuring.interval import percentile
from tune_model.tune.measuring.policy import Policy
from tune_model.tune.records.database import Refusal, Timing
from tune_model.tune.records.identity import measurement_key
from tune_model.tune.workshop import AbandonedRaceError, InterruptedRaceError, Workshop

__all__ = ["CLIMB_RUNG", "FINAL_RUNG", "GUARD_RUNG", "HEAT_RUNG", "Trials", "UnmeasurableError", "mind_abandonment"]

CLIMB_RUNG = 50
HEAT_RUNG = 60
FINAL_RUNG = 100
GUARD_RUNG = 200
"""The times of climbs, heats, finals and the guard are told from a race's rungs by these numbers in the records."""


class UnmeasurableError(Exception):
    """The task itself cannot be measured here; its outcome says why, and is recorded unless that may pass. Internal."""

    def __init__(self, rejected: Rejected, *, may_pass: bool = False) -> None:
        super().__init__(rejected.detail)
        self.rejected = rejected
        self.may_pass = may_pass or rejected.reason in TRANSIENT_REASONS


def mind_abandonment(rejected: Rejected) -> None:
    """Tell a measurement that was given up because the run has to end from a candidate that failed.

    Raises:
        AbandonedRaceError: It was given up.
    """
    if rejected.reason == "abandoned":
        raise AbandonedRaceError


class Trials:
    """The candidates of one task.

    Attributes:
        planned: The task.
        policy: How it is measured.
        protocol: That, and by which code.
        baseline: The extern as a candidate.
        builds: The candidates as machine code.
        times: The latest time of each candidate in this run, in microseconds.
    """

    def __init__(self, planned: PlannedTask, policy: Policy, baseline: Candidate, shop: Workshop) -> None:
        """Prepare; nothing is built, and the task is not on the device yet."""
        self.planned = planned
        self.policy = policy
        self.protocol = f"{policy.key} by {shop.workbench}"
        self.baseline = baseline
        self.shop = shop
        self.builds = Builds(planned, baseline, shop, self._is_known)
        self.times: dict[Candidate, float] = {}
        self._keys: dict[Candidate, str] = {}
        self._errors: dict[Candidate, float] = {}
        self._asked: dict[tuple[Candidate, int], float | None] = {}
        self._open = False

    def key_of(self, candidate: Candidate) -> str:
        """Return a candidate's measurement key."""
        if candidate not in self._keys:
            source = self.shop.source(self.shop.family(candidate))
            key = measurement_key(source, self.planned.key, candidate, self.shop.target, self.protocol)
            self._keys[candidate] = key
        return self._keys[candidate]

    @property
    def seed(self) -> int:
        """Of the task's random inputs."""
        return self.shop.options.seed ^ int(self.planned.key[:12], 16)

    @property
    def extern_us(self) -> float | None:
        """The extern's time, as far as the records know it."""
        known = self.shop.records.timing(self.key_of(self.baseline), 0)
        return None if known is None else known.median_us

    def recorded_us(self, candidate: Candidate, rung: int) -> float | None:
        """Return a candidate's time at a rung from the records, unless all is to be measured again."""
        if self.shop.options.recheck:
            return None
        known = self.shop.records.timing(self.key_of(candidate), rung)
        return None if known is None else known.median_us

    def time(self, candidate: Candidate, rung: int) -> float | None:
        """Time a candidate, or take its time from the records (`race.Timer`); asked twice, it answers the same."""
        if (candidate, rung) not in self._asked:
            self._asked[candidate, rung] = self._time(candidate, rung)
        return self._asked[candidate, rung]

    def check(self, candidate: Candidate, built: Built) -> Rejected | None:
        """Compare a candidate with the reference, unless that was done before; `None` when it is right."""
        self.open()
        if candidate == self.baseline:
            return None
        if candidate not in self._errors or self.shop.options.recheck:
            checked = self.shop.device.check(candidate, built)
            if isinstance(checked, Rejected):
                return checked
            self._errors[candidate] = checked.error
        return None

    def write(self, candidate: Candidate, samples: Samples, rung: int, stage: str) -> None:
        """Record times."""
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
        self.times[candidate] = timing.median_us

    def write_guard(self, candidate: Candidate, samples: Samples, error: float) -> None:
        """Record the times of a winner, or of the extern beside it, that was measured again."""
        self._errors[candidate] = error
        self.write(candidate, samples, GUARD_RUNG, "guard")

    def refuse(self, candidate: Candidate, rejected: Rejected) -> None:
        """Take a candidate out of this run's races, and of later ones unless the reason may pass."""
        self.shop.refused[self.key_of(candidate)] = rejected
        self.shop.records.add(self.key_of(candidate), self.planned.key, Refusal(candidate, rejected))
        self._report(candidate, 0.0, rejected=rejected)

    def refusal(self, candidate: Candidate) -> Rejected | None:
        """Return why a candidate is out: for this run, or by what earlier ones recorded."""
        key = self.key_of(candidate)
        return self.shop.refused.get(key) or self.shop.records.refusal(key)

    def open(self) -> None:
        """Put the task on the device before the first thing that needs it.

        Raises:
            UnmeasurableError: Its extern does not build, or does not run here.
            AbandonedRaceError: The run has to end.
        """
        if self._open:
            return
        baseline = self.builds.obtain(self.baseline)
        if isinstance(baseline, Rejected):
            raise UnmeasurableError(baseline)
        began = self.shop.budget.spent_s
        opened = self.shop.device.open(Bench(self.planned.task, self.policy, baseline, self.seed))
        self.shop.budget.note_open(self.shop.budget.spent_s - began)
        if isinstance(opened, Rejected):
            mind_abandonment(opened)
            raise UnmeasurableError(opened)
        self._errors[self.baseline] = opened.error
        self._open = True

    def close(self) -> None:
        """Forget queued builds and take the task off the device."""
        self.builds.drop()
        if self._open:
            self.shop.device.finish()
            self._open = False

    def mind_interruption(self) -> None:
        """Raise `InterruptedRaceError` when the user has asked to stop."""
        if self.shop.stop.is_set():
            raise InterruptedRaceError

    def _is_known(self, candidate: Candidate) -> bool:
        """Say whether the records make a build needless for now: it is out, or its first time is there."""
        if self.shop.options.recheck:
            return False
        known = self.shop.records.timing(self.key_of(candidate), 0)
        return known is not None or self.refusal(candidate) is not None

    def _time(self, candidate: Candidate, rung: int) -> float | None:
        self.mind_interruption()
        key = self.key_of(candidate)
        if not self.shop.options.recheck:
            refused = self.refusal(candidate)
            if refused is not None:
                self._report(candidate, 0.0, rejected=refused, replayed=True)
                return None
            known = self.shop.records.timing(key, rung)
            if known is not None:
                self._errors.setdefault(candidate, known.error)
                self.times[candidate] = known.median_us
                self._report(candidate, known.median_us, replayed=True)
                return known.median_us
        if self.shop.out_of_time and candidate != self.baseline:
            return self.times.get(candidate)
        samples = self._measure(candidate, rung)
        if isinstance(samples, Rejected):
            mind_abandonment(samples)
            if candidate == self.baseline:
                raise UnmeasurableError(samples)
            self.refuse(candidate, samples)
            return None
        self.write(candidate, samples, rung, "race")
        self._report(candidate, self.times[candidate])
        return self.times[candidate]

    def _measure(self, candidate: Candidate, rung: int) -> Samples | Rejected:
        built = self.builds.obtain(candidate)
        if isinstance(built, Rejected):
            return built
        checked = self.check(candidate, built)
        if isinstance(checked, Rejected):
            return checked
        length = self.policy.rungs[min(rung, len(self.policy.rungs) - 1)]
        samples = self.shop.device.time(candidate, built, length)
        if isinstance(samples, Samples) and samples.doubtful and self.shop.pause():
            self.shop.repeated += 1
            samples = self.shop.device.time(candidate, built, length)
        return samples

    def _report(
        self, candidate: Candidate, time_us: float, *, rejected: Rejected | None = None, replayed: bool = False
    ) -> None:
        best_us = min(self.times.values(), default=0.0)
        baseline_us = self.times.get(self.baseline, 0.0)
        event = CandidateDone(self.planned.key, candidate, time_us, best_us, baseline_us, replayed, rejected)
        self.shop.report(event)
