"""Interleaved timing: every round runs each contender once, in a new random order, so drift hits all of them alike.

Device time on CUDA is between two events around the call; wall time is a host clock around the call and a
synchronisation. On a CPU both are the host clock. docs/measuring.md states the protocol.
"""

import math
import random
import statistics
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import msgspec
import torch

__all__ = ["Contender", "Timing", "interleave"]

# Two-sided 97.5 % quantiles of Student's t for small samples; from 30 on the normal quantile is within 4 %.
_T = {2: 12.71, 3: 4.30, 4: 3.18, 5: 2.78, 6: 2.57, 7: 2.45, 8: 2.36, 9: 2.31, 10: 2.26, 15: 2.14, 20: 2.09, 30: 2.05}


class Contender(NamedTuple):
    """One way to do the work.

    Attributes:
        name: `tuned`, `eager`, `eager_graph`, `max_autotune`, ...
        run: Does the work once; may return without waiting for the device.
    """

    name: str
    run: Callable[[], object]


class Timing(msgspec.Struct, frozen=True):
    """A contender's times in milliseconds.

    Attributes:
        name: Contender.
        median_ms: Device time, median over rounds.
        low_ms: 20th percentile.
        high_ms: 80th percentile.
        wall_ms: Host time of a call followed by a synchronisation, median.
        ratio: This contender's time / the first contender's, geometric mean over rounds; above 1 is slower.
        ratio_low: Lower end of its 95 % interval (paired by round).
        ratio_high: Upper end.
        rounds: How many rounds.
    """

    name: str
    median_ms: float
    low_ms: float
    high_ms: float
    wall_ms: float
    ratio: float
    ratio_low: float
    ratio_high: float
    rounds: int


def interleave(
    contenders: Sequence[Contender], device: torch.device, *, rounds: int, budget_s: float = 20.0, seed: int = 0
) -> tuple[Timing, ...]:
    """Time contenders against each other.

    Args:
        contenders: The first is the one that ratios refer to.
        device: Where they run.
        rounds: How often each runs; fewer (at least 5) when `budget_s` would be exceeded.
        budget_s: Seconds to spend.
        seed: Of the order within rounds.
    """
    for contender in contenders:
        for _ in range(3):
            contender.run()
    _synchronize(device)
    device_ms: list[list[float]] = [[] for _ in contenders]
    wall_ms: list[list[float]] = [[] for _ in contenders]
    order = list(range(len(contenders)))
    shuffle = random.Random(seed)  # noqa: S311 - an order of measurements, not a secret
    started = time.perf_counter()
    for done in range(rounds):
        if done >= 5 and time.perf_counter() - started > budget_s:
            break
        shuffle.shuffle(order)
        for index in order:
            event_ms, host_ms = _once(contenders[index].run, device)
            device_ms[index].append(event_ms)
            wall_ms[index].append(host_ms)
    return tuple(
        _summary(contender.name, device_ms[i], wall_ms[i], device_ms[0]) for i, contender in enumerate(contenders)
    )


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _once(run: Callable[[], object], device: torch.device) -> tuple[float, float]:
    if device.type != "cuda":
        started = time.perf_counter()
        run()
        elapsed = (time.perf_counter() - started) * 1e3
        return elapsed, elapsed
    before, after = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize(device)
    started = time.perf_counter()
    before.record()
    run()
    after.record()
    torch.cuda.synchronize(device)
    return before.elapsed_time(after), (time.perf_counter() - started) * 1e3


def _summary(name: str, times: list[float], walls: list[float], reference: list[float]) -> Timing:
    ratio, low, high = paired_interval(times, reference)
    ordered = sorted(times)
    return Timing(
        name=name,
        median_ms=statistics.median(times),
        low_ms=ordered[int(0.2 * (len(ordered) - 1))],
        high_ms=ordered[int(0.8 * (len(ordered) - 1))],
        wall_ms=statistics.median(walls),
        ratio=ratio,
        ratio_low=low,
        ratio_high=high,
        rounds=len(times),
    )


def paired_interval(times: Sequence[float], reference: Sequence[float]) -> tuple[float, float, float]:
    """Return the geometric mean of times / reference and its 95 % interval, from the log ratios of each round.

    Student's t on the log ratios; with fewer than two rounds the interval is unbounded.
    """
    logs = [math.log(a / b) for a, b in zip(times, reference, strict=True)]
    mean = statistics.fmean(logs)
    if len(logs) < 2:
        return math.exp(mean), 0.0, math.inf
    quantile = next((q for n, q in sorted(_T.items()) if len(logs) <= n), 1.96)
    half = quantile * statistics.stdev(logs) / math.sqrt(len(logs))
    return math.exp(mean), math.exp(mean - half), math.exp(mean + half)
