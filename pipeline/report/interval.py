"""A speedup of several tasks together, with its interval, from the tasks' own speedups and intervals."""

from collections.abc import Iterable
from typing import NamedTuple

import msgspec

from tune_model.tune.measuring.interval import bounds, log_deviation, log_deviation_of_sum

__all__ = ["Gain", "Part", "total_gain"]


class Gain(msgspec.Struct, frozen=True):
    """A speedup, before / after, with its 95 % interval."""

    ratio: float
    low: float
    high: float


class Part(NamedTuple):
    """One task's part in a sum: times already weighted."""

    before_us: float
    after_us: float
    gain_low: float
    gain_high: float


def total_gain(parts: Iterable[Part]) -> Gain:
    """Return the speedup of the sum.

    The tasks were measured apart from each other, so their errors are taken as independent: the variances of the tasks'
    times add up. A task without a gain contributes its time and no error.
    """
    added = tuple(parts)
    before, after = sum(part.before_us for part in added), sum(part.after_us for part in added)
    if before <= 0 or after <= 0:
        return Gain(1.0, 1.0, 1.0)
    deviation = log_deviation_of_sum((p.after_us, log_deviation(p.gain_low, p.gain_high)) for p in added)
    return Gain(before / after, *bounds(before / after, deviation))
