"""Builds in child processes: many at once, ahead of measuring, each with a time limit; a crash costs one candidate.

A thread hands jobs to the children and collects results, so that they stay busy while the caller measures. Urgent jobs
overtake the others. Children start with the first job and are replaced when they die.
"""

import heapq
import itertools
import logging
import os
import tempfile
import threading
import time
from collections.abc import Collection
from multiprocessing import connection as mp_connection
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Final, NamedTuple

import msgspec

from tune_model.extract.task import Task
from tune_model.tune.building.scratch import use_compiler_cache
from tune_model.tune.candidate import Built, Config, Family, Rejected
from tune_model.tune.measuring.memory import limit_for_builds
from tune_model.tune.processes.answers import ANSWER_AT_MOST, Answer, AnswerError, decode_answer, encode_answer
from tune_model.tune.processes.child import Child, Limits
from tune_model.tune.processes.tree import strays
from tune_model.tune.target import Target

__all__ = ["BuildPool", "Job"]

logger = logging.getLogger(__name__)

_START_S: Final = 120.0
"""A child imports torch and triton before its first build; with sixteen starting at once that takes a while."""

_FILE_BYTES: Final = 1 << 30
"""Largest file a build may write: a compiler that prints without end fills no disk."""

_STARTED: Final = b"started"
_MEMORY_SIGNS: Final = ("MemoryError", "out of memory", "std::bad_alloc", "Cannot allocate memory")


class Job(msgspec.Struct, frozen=True):
    """One build.

    Attributes:
        family: A stateless object whose class the child can import.
        task: What to build for.
        config: Which configuration.
        target: The machine.
    """

    family: Family
    task: Task
    config: Config
    target: Target


_NO_BUILD: Final = Rejected("crash", "the build process answered with something else than a build")


class _Pending(NamedTuple):
    order: tuple[int, int]
    ticket: int
    job: Job


class _Worker:
    """A child and the job it is at."""

    def __init__(self, number: int, cache: Path) -> None:
        self.child = Child(_serve, (cache,), f"build-{number}", Limits(limit_for_builds(), _FILE_BYTES), (str(cache),))
        self.ticket: int | None = None
        self.deadline = float("inf")

    def give(self, pending: _Pending) -> None:
        self.ticket = pending.ticket
        self.deadline = time.monotonic() + _START_S
        self.child.connection.send(pending.job)


class BuildPool:
    """A pool of build processes.

    Attributes:
        finished: How many builds were run, failed ones included.
    """

    def __init__(self, workers: int, timeout_s: float) -> None:
        """Prepare a pool; no process is started yet.

        Args:
            workers: How many processes.
            timeout_s: Longest time one build may take.
        """
        self.workers = workers
        self.timeout_s = timeout_s
        self.finished = 0
        self._numbers = itertools.count()
        self._lock = threading.Condition()
        self._waiting: list[_Pending] = []
        self._open: set[int] = set()
        self._unfinished: set[int] = set()
        self._results: dict[int, Built | Rejected] = {}
        self._closed = False
        self._failure: BaseException | None = None
        self._thread: threading.Thread | None = None
        self._wake, self._woken = mp_connection.Pipe()

    def submit(self, job: Job, *, urgent: bool = False) -> int:
        """Queue a build; returns the ticket to `wait` for."""
        ticket = next(self._numbers)
        with self._lock:
            self._open.add(ticket)
            self._unfinished.add(ticket)
            heapq.heappush(self._waiting, _Pending((0 if urgent else 1, ticket), ticket, job))
            if self._thread is None:
                self._thread = threading.Thread(target=self._dispatch, name="build-pool", daemon=True)
                self._thread.start()
        self._wake.send_bytes(b".")
        return ticket

    def hurry(self, tickets: Collection[int]) -> None:
        """Move queued builds to the front: their results are waited for."""
        wanted = set(tickets)
        with self._lock:
            self._waiting = [p._replace(order=(0, p.ticket)) if p.ticket in wanted else p for p in self._waiting]
            heapq.heapify(self._waiting)

    def wait(self, tickets: Collection[int], timeout_s: float) -> dict[int, Built | Rejected]:
        """Return the results that are there, as soon as one is; empty when none came in time. Each is given once.

        Raises:
            RuntimeError: The thread that hands out builds has died.
        """
        wanted = set(tickets)
        with self._lock:
            self._lock.wait_for(lambda: self._failure is not None or not wanted.isdisjoint(self._results), timeout_s)
            if self._failure is not None:
                raise RuntimeError("the build pool's dispatcher died") from self._failure
            return {ticket: self._results.pop(ticket) for ticket in wanted & self._results.keys()}

    def wait_idle(self, timeout_s: float) -> bool:
        """Wait until nothing is queued or being built; says whether that came in time."""
        with self._lock:
            return self._lock.wait_for(lambda: self._failure is not None or not self._unfinished, timeout_s)

    def cancel(self, tickets: Collection[int]) -> None:
        """Forget queued builds; running ones go on, and nobody asks for their results."""
        wanted = set(tickets)
        with self._lock:
            self._unfinished -= {p.ticket for p in self._waiting if p.ticket in wanted}
            self._waiting = [p for p in self._waiting if p.ticket not in wanted]
            heapq.heapify(self._waiting)
            self._open -= wanted
            for ticket in wanted:
                self._results.pop(ticket, None)

    @property
    def queued(self) -> int:
        """How many jobs no child has taken yet."""
        with self._lock:
            return len(self._waiting)

    def close(self) -> None:
        """Kill all children and drop what is queued; closing twice is fine."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._waiting.clear()
        if self._thread is not None:
            self._wake.send_bytes(b".")
            self._thread.join()
        self._wake.close()
        self._woken.close()

    def _dispatch(self) -> None:
        workers: list[_Worker] = []
        cache = tempfile.TemporaryDirectory(prefix="tune-model-compiled-", ignore_cleanup_errors=True)
        try:
            while not self._closed:
                self._feed(workers, Path(cache.name))
                self._collect(workers)
        except BaseException as error:
            with self._lock:
                self._failure = error
                self._lock.notify_all()
            raise
        finally:
            for worker in workers:
                worker.child.kill()
            cache.cleanup()

    def _feed(self, workers: list[_Worker], cache: Path) -> None:
        while True:
            with self._lock:
                if not self._waiting or self._closed:
                    return
                idle = next((w for w in workers if w.ticket is None), None)
                if idle is None and len(workers) >= self.workers:
                    return
                pending = heapq.heappop(self._waiting)
            if idle is None:
                idle = _Worker(len(workers), cache)
                workers.append(idle)
            try:
                idle.give(pending)
            except OSError:  # it died while idle: the job goes to its successor
                self._replace(workers, idle)
                with self._lock:
                    heapq.heappush(self._waiting, pending)

    def _collect(self, workers: list[_Worker]) -> None:
        busy = {w.child.connection: w for w in workers if w.ticket is not None}
        nearest = min((w.deadline for w in busy.values()), default=float("inf"))
        timeout = None if nearest == float("inf") else max(0.0, nearest - time.monotonic())
        for ready in mp_connection.wait([self._woken, *busy], timeout):
            if ready is self._woken:
                self._woken.recv_bytes()
            elif isinstance(ready, Connection):
                self._receive(workers, busy[ready])
        now = time.monotonic()
        for worker in list(busy.values()):
            if worker.ticket is not None and worker.deadline <= now and not worker.child.connection.poll():
                self._finish(worker, Rejected("timeout", f"build took longer than {self.timeout_s:g} s"))
                self._replace(workers, worker)

    def _receive(self, workers: list[_Worker], worker: _Worker) -> None:
        try:
            message = worker.child.connection.recv_bytes(ANSWER_AT_MOST)
            answer = None if message == _STARTED else decode_answer(message)
        except (EOFError, OSError):
            ending = worker.child.post_mortem()
            reason = "out of memory" if ending.is_out_of_memory else "crash"
            answer = Answer(Rejected(reason, f"the build process {ending}"), broken=True)
        except AnswerError as error:
            answer = Answer(Rejected("crash", f"the build process answered with garbage: {error}"), broken=True)
        if answer is None:
            worker.deadline = time.monotonic() + self.timeout_s
            return
        found = answer.found
        self._finish(worker, found if isinstance(found, Built | Rejected) else _NO_BUILD)
        if answer.broken:
            self._replace(workers, worker)

    def _finish(self, worker: _Worker, result: Built | Rejected) -> None:
        with self._lock:
            self.finished += 1
            if worker.ticket is not None:
                self._unfinished.discard(worker.ticket)
            if worker.ticket in self._open:
                self._open.discard(worker.ticket)
                self._results[worker.ticket] = result
            self._lock.notify_all()
        worker.ticket = None
        worker.deadline = float("inf")

    def _replace(self, workers: list[_Worker], worker: _Worker) -> None:
        worker.child.kill()
        workers.remove(worker)


def _serve(connection: Connection, cache: Path) -> None:
    """Build until the connection closes (in the child)."""
    os.nice(5)  # measuring must not wait for builds
    # What a compiler writes on the way, and leaves when it is killed, goes with the folder.
    os.environ["TMPDIR"] = tempfile.tempdir = str(cache)
    with use_compiler_cache(cache):
        while True:
            job: Job = connection.recv()
            os.ftruncate(1, 0)  # what was said about earlier builds
            connection.send_bytes(_STARTED)
            answer = Answer(build(job))
            left = strays()
            if left:
                what = f"left {len(left)} processes running"
                answer = Answer(Rejected("processes", f"the build {what}"), broken=True)
            connection.send_bytes(encode_answer(answer))


def build(job: Job) -> Built | Rejected:
    """Run one build here; an exception is the family's fault and becomes a reason."""
    try:
        result = job.family.build(job.task, job.config, job.target)
    except Exception as error:  # a family may raise anything; it costs the candidate only
        logger.debug("build failed", exc_info=True)
        text = str(error).strip().splitlines()
        result = Rejected("compiler", f"{type(error).__name__}: {text[0] if text else ''}"[:500])
    return _named(result) if isinstance(result, Rejected) else result


def _named(rejected: Rejected) -> Rejected:
    """Tell a compiler that ran out of memory from one that refuses its input."""
    out_of_memory = rejected.reason == "compiler" and any(sign in rejected.detail for sign in _MEMORY_SIGNS)
    return Rejected("out of memory", rejected.detail) if out_of_memory else rejected
