"""What all races of a run share: families, device, build pool, store, records, and the running counts.

Also the one place that decides whether something has to be built or can be taken from the store.
"""

import threading
import time
from collections.abc import Callable

from tune_model.tune.budget import Budget
from tune_model.tune.building.pool import BuildPool
from tune_model.tune.building.source import digest_family, digest_measuring
from tune_model.tune.building.store import KernelStore
from tune_model.tune.building.trial import CompilerWatch
from tune_model.tune.candidate import TRANSIENT_REASONS, Built, Candidate, Family, Rejected
from tune_model.tune.device import Device
from tune_model.tune.events import Event
from tune_model.tune.options import TuneOptions
from tune_model.tune.records.database import Records
from tune_model.tune.records.identity import FamilySource, target_key
from tune_model.tune.target import CudaTarget, Target

__all__ = ["AbandonedRaceError", "InterruptedRaceError", "Workshop"]

_GRACE_S = 5.0
"""After Ctrl-C the candidate in flight may finish, unless it takes longer than this."""

_PAUSE_S = 0.5
_PATIENCE_S = 10.0
"""So long a run waits in all for other processes to leave the machine."""


class InterruptedRaceError(Exception):
    """The user asked to stop: the race in flight is abandoned. Internal; `tune` returns what it has."""


class AbandonedRaceError(Exception):
    """The time of the whole run is over: the race in flight is abandoned; what it measured is recorded. Internal."""


class Workshop:
    """Shared equipment of one run.

    Attributes:
        families: The baseline first.
        target: The machine.
        target_key: All of it, as races are keyed by.
        workbench: Hash of the code that takes a task's times, as races and measurements are keyed by.
        device: Where candidates are checked and timed.
        pool: Builds.
        compiler: Looks at what the pool built.
        store: Built kernels.
        records: Measurements.
        options: The caller's.
        report: Told what happens.
        stop: Set when the user interrupts.
        budget: The run's time.
        is_assembling: All measuring is over; what is left is fetched whatever the time.
        builds: Kernels built in this run.
        measured: Measurements taken in this run.
        repeated: Measurements among them that something disturbed, so that they were taken again.
        refused: Candidates that are out of this run, by measurement key, and why.
    """

    def __init__(
        self,
        families: tuple[Family, ...],
        target: Target,
        device: Device,
        options: TuneOptions,
        report: Callable[[Event], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Open the records and the store; no process is started yet.

        Args:
            families: The baseline first.
            target: The machine.
            device: Where candidates are checked and timed.
            options: The caller's.
            report: Told what happens.
            clock: What the budget is spent by, in seconds.

        Raises:
            RecordsError: The records cannot be opened.
        """
        self.families = families
        self.target = target
        self.target_key = target_key(target)
        self.workbench = digest_measuring("tune_model.tune.measuring.workbench")
        self.device = device
        self.options = options
        self.report = report
        self.records = Records(options.records_path)
        self.store = KernelStore(options.kernels_path)
        self.pool = BuildPool(options.build_workers, options.build_timeout_s)
        self.stop = threading.Event()
        self.compiler = CompilerWatch(self.pool, target, self.stop)
        self.builds = 0
        self.measured = 0
        self.repeated = 0
        self.refused: dict[str, Rejected] = {}
        self.budget = Budget(options.budget_s, clock)
        self.is_assembling = False
        self._stop_seen: float | None = None
        self._patience_s = _PATIENCE_S
        self._by_name = {family.name: family for family in families}
        self._sources: dict[str, FamilySource] = {}

    @property
    def overlap(self) -> bool:
        """Builds may run while the device measures: on a GPU, not on the CPU that is being timed."""
        return isinstance(self.target, CudaTarget)

    @property
    def out_of_time(self) -> bool:
        """The race at hand has used up its share, or the search its time."""
        return self.budget.is_spent

    @property
    def is_over(self) -> bool:
        """Nothing at all may be measured any more: the budget is overdrawn, or the user has asked to stop."""
        return self.budget.left_s <= 0 or self.stop.is_set()

    def seconds_left(self) -> float:
        """Return how long a wait may still take: until the budget is overdrawn, or a moment after Ctrl-C."""
        if not self.stop.is_set():
            self._stop_seen = None
            return self.budget.left_s
        if self._stop_seen is None:
            self._stop_seen = self.budget.clock()
        return min(self.budget.left_s, self._stop_seen + _GRACE_S - self.budget.clock())

    def pause(self) -> bool:
        """Wait a little for the machine to calm down; `False` at once when this run has waited long enough."""
        if self._patience_s <= 0 or self.out_of_time or self.is_over:
            return False
        self._patience_s -= _PAUSE_S
        self.stop.wait(_PAUSE_S)
        return not self.stop.is_set()

    def family(self, candidate: Candidate) -> Family:
        """Return a candidate's family."""
        return self._by_name[candidate.family]

    def source(self, family: Family) -> FamilySource:
        """Return a family's source identity, hashed once per run."""
        if family.name not in self._sources:
            self._sources[family.name] = digest_family(family)
        return self._sources[family.name]

    def keep(self, key: str, result: Built | Rejected) -> None:
        """Count a build and put it in the store, unless it failed for a reason that may pass."""
        self.builds += 1
        if not (isinstance(result, Rejected) and result.reason in TRANSIENT_REASONS):
            self.store.put(key, result)

    def close(self) -> None:
        """End every process and close the records."""
        self.pool.close()
        self.device.close()
        self.records.close()
