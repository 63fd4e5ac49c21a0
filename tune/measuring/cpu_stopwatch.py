"""Timing on a CPU: interleaved rounds on a machine that others share, so each sample is the best of a few calls.

Times quantise and have a long upper tail there; the fastest call of a round is what the code costs, and rounds show how
that drifts. A sample during which a thread had to wait for a core is left out; where too few others remain, the times
are marked as doubtful.
"""

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from random import Random
from typing import Final

from tune_model.tune.device import Samples
from tune_model.tune.measuring.contention import Contention
from tune_model.tune.measuring.policy import Rung

__all__ = ["CpuCalls", "CpuStopwatch"]

_TICKS_US: Final = 20.0
"""A single timing shorter than this would be mostly the clock: calls are then timed in batches."""

_LONG_US: Final = 5000.0
"""A call that takes longer is not repeated within a sample, nor to estimate its time."""

_TOLERATED: Final = 0.03
"""Share of a sample that threads may wait for a core: interrupts and the kernel's own threads take some always."""

_ATTEMPTS: Final = 2
"""So many times the samples asked for are taken at most, to get enough that nothing disturbed."""


class CpuCalls:
    """A candidate ready to be timed.

    Attributes:
        run: Calls it on the given set of inputs.
        copies: How many sets there are.
        estimate_us: A call's time, roughly.
    """

    def __init__(self, run: Callable[[int], None], copies: int) -> None:
        self.run = run
        self.copies = copies
        self.turn = 0
        run(0)
        self.estimate_us = self._batch(1)
        for _ in range(2):
            if self.estimate_us < _LONG_US:
                self.estimate_us = min(self.estimate_us, self._batch(1))

    def sample(self, length_us: float) -> float:
        """Return the lowest time per call over about `length_us`; of two batches at least unless a call is long."""
        batch = max(1, round(_TICKS_US / max(self.estimate_us, 0.1)))
        lowest = self._batch(batch)
        spent, batches = lowest * batch, 1
        while spent < length_us or (batches < 2 and spent < _LONG_US):
            time_us = self._batch(batch)
            lowest = min(lowest, time_us)
            spent += time_us * batch
            batches += 1
        # The first estimate may have met a busy moment, and the batch with it.
        self.estimate_us = min(self.estimate_us, lowest)
        return lowest

    def _batch(self, calls: int) -> float:
        run, copies, turn = self.run, self.copies, self.turn
        start = time.perf_counter_ns()
        for number in range(calls):
            run((turn + number) % copies)
        spent = time.perf_counter_ns() - start
        self.turn = (turn + calls) % copies
        return spent / calls / 1000.0


class CpuStopwatch:
    """Times candidates on this machine's CPU with as many threads as torch is set to.

    Args:
        contention: Tells how long threads waited for a core.
    """

    def __init__(self, contention: Contention | None = None) -> None:
        self.contention = contention or Contention()

    def prepare(self, run: Callable[[int], None], copies: int) -> CpuCalls:
        """Call once to warm up, and estimate the time of a call."""
        return CpuCalls(run, copies)

    def time(self, calls: CpuCalls, rung: Rung) -> Samples:
        """Time one candidate alone."""
        return self._rounds([calls], rung, lambda _order: None)[0]

    def compare(self, contenders: Sequence[CpuCalls], rung: Rung, seed: int) -> list[Samples]:
        """Time candidates in interleaved rounds, in random order within each.

        A round counts for all of them or for none.
        """
        return self._rounds(contenders, rung, Random(seed).shuffle)  # noqa: S311 (an order of measurements)

    def context(self) -> AbstractContextManager[None]:
        """Return the context in which everything must run: none."""
        return nullcontext()

    def reset(self) -> None:
        """Nothing is kept between tasks."""

    def warm_up(self) -> None:
        """Nothing: the first rounds of every candidate warm the caches it needs."""

    def synchronize(self) -> None:
        """Nothing: calls return when they are done."""

    def _rounds(
        self, contenders: Sequence[CpuCalls], rung: Rung, shuffle: Callable[[list[int]], None]
    ) -> list[Samples]:
        order = list(range(len(contenders)))
        rounds: list[list[float]] = []
        calm: list[list[float]] = []
        began = time.perf_counter_ns()
        while len(calm) < rung.samples and len(rounds) < _ATTEMPTS * rung.samples:
            enough = len(calm) >= rung.least or len(rounds) >= _ATTEMPTS * rung.least
            if enough and (time.perf_counter_ns() - began) / 1000.0 > rung.most_us:
                break
            shuffle(order)
            times, is_calm = [0.0] * len(contenders), True
            for index in order:
                times[index], undisturbed = self._sample(contenders[index], rung.sample_us)
                is_calm = is_calm and undisturbed
            rounds.append(times)
            if is_calm:
                calm.append(times)
        doubtful = len(calm) < rung.least
        kept = rounds if doubtful else calm
        return [Samples(us, doubtful, doubtful) for us in zip(*kept, strict=True)]

    def _sample(self, calls: CpuCalls, length_us: float) -> tuple[float, bool]:
        """Take a sample and say whether all threads had a core."""
        waited = self.contention.waited_us()
        began = time.perf_counter_ns()
        lowest = calls.sample(length_us)
        spent_us = (time.perf_counter_ns() - began) / 1000.0
        return lowest, self.contention.waited_us() - waited <= _TOLERATED * spent_us
