"""Timing on a CPU: interleaved rounds on a machine that others share, so each sample is the best of a few calls.

Times quantise and have a long upper tail there; the fastest call of a round is what the code costs, and rounds show how
that drifts.
"""

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from random import Random

from tune_model.tune.device import Samples
from tune_model.tune.interval import drifted
from tune_model.tune.policy import Rung

__all__ = ["CpuCalls", "CpuStopwatch"]

_TICKS_US = 20.0
"""A single timing shorter than this would be mostly the clock: calls are then timed in batches."""


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
        self.estimate_us = min(self._batch(1) for _ in range(3))

    def sample(self, length_us: float) -> float:
        """Return the lowest time per call over about `length_us`, but at least two batches."""
        batch = max(1, round(_TICKS_US / max(self.estimate_us, 0.1)))
        lowest = self._batch(batch)
        spent = lowest * batch
        while True:
            time_us = self._batch(batch)
            lowest = min(lowest, time_us)
            spent += time_us * batch
            if spent >= length_us:
                break
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
    """Times candidates on this machine's CPU with as many threads as torch is set to."""

    def prepare(self, run: Callable[[int], None], copies: int) -> CpuCalls:
        """Call once to warm up, and estimate the time of a call."""
        return CpuCalls(run, copies)

    def time(self, calls: CpuCalls, rung: Rung) -> Samples:
        """Time one candidate alone."""
        return Samples(tuple(calls.sample(rung.sample_us) for _ in range(rung.samples)))

    def compare(self, contenders: Sequence[CpuCalls], rung: Rung, seed: int) -> list[Samples]:
        """Time candidates in interleaved rounds, in random order within each."""
        order = list(range(len(contenders)))
        shuffle = Random(seed).shuffle  # noqa: S311 (an order of measurements)
        times: list[list[float]] = [[] for _ in contenders]
        for _ in range(rung.samples):
            shuffle(order)
            for index in order:
                times[index].append(contenders[index].sample(rung.sample_us))
        disturbed = drifted(times[0], 0.15)
        return [Samples(tuple(us), disturbed) for us in times]

    def context(self) -> AbstractContextManager[None]:
        """Return the context in which everything must run: none."""
        return nullcontext()

    def reset(self) -> None:
        """Nothing is kept between tasks."""

    def warm_up(self) -> None:
        """Nothing: the first rounds of every candidate warm the caches it needs."""

    def synchronize(self) -> None:
        """Nothing: calls return when they are done."""
