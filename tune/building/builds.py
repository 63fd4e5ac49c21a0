"""One task's builds: from the store where it has them, from the pool otherwise, each at most once."""

from collections.abc import Callable, Iterable, Iterator, Sequence

from tune_model.extract.task import PlannedTask
from tune_model.tune.building.pool import Job, build
from tune_model.tune.candidate import Built, Candidate, Rejected
from tune_model.tune.records.identity import build_key
from tune_model.tune.workshop import AbandonedRaceError, InterruptedRaceError, Workshop

__all__ = ["Builds"]

_LAST_BUILDS_S = 3.0
_LAST_PART = 0.02
"""Builds that are running when time is up may end for so long, or this part of the budget, before more is measured."""


class Builds:
    """The candidates of a task as machine code, as far as they are asked for."""

    def __init__(
        self, planned: PlannedTask, baseline: Candidate, shop: Workshop, is_known: Callable[[Candidate], bool]
    ) -> None:
        """Prepare; nothing is built.

        Args:
            planned: The task.
            baseline: Made of ATen calls, so it is built here at once, and not counted.
            shop: Pool and store.
            is_known: Whether the records make a candidate's build needless for now.
        """
        self.planned = planned
        self.baseline = baseline
        self.shop = shop
        self.is_known = is_known
        self._done: dict[Candidate, Built | Rejected] = {}
        self._tickets: dict[int, Candidate] = {}

    def request(self, candidates: Sequence[Candidate], *, urgent: bool = False) -> None:
        """Queue builds that are neither here nor in the store, of candidates that the records do not know.

        Urgent ones overtake the builds of other races.
        """
        self._queue([c for c in candidates if c in self._done or not self.is_known(c)], urgent=urgent)

    def _queue(self, candidates: Sequence[Candidate], *, urgent: bool) -> None:
        pending = {candidate: ticket for ticket, candidate in self._tickets.items()}
        if urgent:
            self.shop.pool.hurry([pending[c] for c in candidates if c in pending])
        for candidate in candidates:
            if candidate in self._done or candidate in pending:
                continue
            job = Job(self.shop.family(candidate), self.planned.task, candidate.config, self.shop.target)
            if candidate == self.baseline:
                self._done[candidate] = build(job)
                continue
            stored = self.shop.store.get(self._key(candidate))
            if stored is not None:
                self._done[candidate] = stored
            else:
                self._tickets[self.shop.pool.submit(job, urgent=urgent)] = candidate

    def obtain(self, candidate: Candidate) -> Built | Rejected:
        """Return a candidate as machine code, waiting for its build if need be.

        Raises:
            InterruptedRaceError: The user asked to stop meanwhile.
            AbandonedRaceError: The whole run's time is over.
            CompilerBrokenError: The compiler refuses every kernel, not this one.
        """
        self._queue([candidate], urgent=True)
        while candidate not in self._done:
            self._collect()
        return self._done[candidate]

    def settle(self) -> None:
        """Wait until nothing is being built, or time is up; then nothing more is begun, so that measuring can be.

        Raises:
            InterruptedRaceError: The run was asked to stop meanwhile.
        """
        while not self.shop.out_of_time:
            if self._tickets:
                self._collect()
            elif self.shop.pool.wait_idle(0.2):
                return
            elif self.shop.stop.is_set():
                raise InterruptedRaceError
        self.drop()
        self.shop.pool.wait_idle(min(_LAST_BUILDS_S, _LAST_PART * self.shop.budget.seconds))

    def as_ready(self, candidates: Iterable[Candidate]) -> Iterator[Candidate]:
        """Yield candidates as their builds finish; all at the end where builds would disturb the timing."""
        waiting = list(candidates)
        self.request(waiting)
        if not self.shop.overlap:
            self.settle()
        while waiting:
            pending = set(self._tickets.values())
            ready = next((c for c in waiting if c not in pending), None)
            if ready is not None:
                waiting.remove(ready)
                yield ready
            elif self.shop.out_of_time:
                return
            else:
                self._collect()

    def drop(self) -> None:
        """Forget what is still queued."""
        self.shop.pool.cancel(self._tickets)
        self._tickets.clear()

    def _collect(self, timeout_s: float = 1.0) -> None:
        if self.shop.stop.is_set():
            raise InterruptedRaceError
        if self.shop.is_over and not self.shop.is_assembling:
            raise AbandonedRaceError
        for ticket, result in self.shop.pool.wait(self._tickets, timeout_s).items():
            self.shop.compiler.mind(result, self.planned.task)
            if self.shop.stop.is_set():
                raise InterruptedRaceError
            candidate = self._tickets.pop(ticket)
            self._done[candidate] = result
            self.shop.keep(self._key(candidate), result)

    def _key(self, candidate: Candidate) -> str:
        source = self.shop.source(self.shop.family(candidate))
        return build_key(source, self.planned.key, candidate, self.shop.target)
