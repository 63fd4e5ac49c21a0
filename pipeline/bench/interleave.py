"""Interleaved timing: every round runs each contender once, in a new random order, so drift hits all of them alike.

Device time on CUDA is between two events around a call that is launched while the device spins, so it begins with the
work and not with the launch; wall time is a host clock around another call and a synchronisation. On a CPU both are the
host clock. docs/measuring.md states the protocol.
"""

import random
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

import msgspec
import torch

from tune_model.tune.measuring.interval import FEWEST_PAIRS, paired_ratio

__all__ = ["Contender", "Timing", "device_time_ms", "interleave"]

_SPIN_CYCLES: Final = 2_000_000
"""Of a GPU's clock, about a millisecond: longer than launching a graph takes, guards of compiled code included."""


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
        ratio: This contender's time / the first contender's, paired by round, median; above 1 is slower.
        ratio_low: Lower end of its 95 % interval, that of the sign test as in races.
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
        rounds: How often each runs; fewer (at least `FEWEST_PAIRS`) when `budget_s` would be exceeded.
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
        if done >= FEWEST_PAIRS and time.perf_counter() - started > budget_s:
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
    """Return a call's device time and another's wall time; on a CPU one call's time twice."""
    elapsed = device_time_ms(run, device)
    if device.type != "cuda":
        return elapsed, elapsed
    started = time.perf_counter()
    run()
    torch.cuda.synchronize(device)
    return elapsed, (time.perf_counter() - started) * 1e3


def device_time_ms(run: Callable[[], object], device: torch.device) -> float:
    """Return how long the device is at a call, in milliseconds; nothing else runs before or after it."""
    if device.type != "cuda":
        started = time.perf_counter()
        run()
        return (time.perf_counter() - started) * 1e3
    with torch.cuda.device(device):
        before, after = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize(device)
        torch.cuda._sleep(_SPIN_CYCLES)
        before.record()
        run()
        after.record()
        torch.cuda.synchronize(device)
        return float(before.elapsed_time(after))


def _summary(name: str, times: list[float], walls: list[float], reference: list[float]) -> Timing:
    ratio = paired_ratio(times, reference)
    ordered = sorted(times)
    return Timing(
        name=name,
        median_ms=statistics.median(times),
        low_ms=ordered[int(0.2 * (len(ordered) - 1))],
        high_ms=ordered[int(0.8 * (len(ordered) - 1))],
        wall_ms=statistics.median(walls),
        ratio=ratio.median,
        ratio_low=ratio.low,
        ratio_high=ratio.high,
        rounds=len(times),
    )
