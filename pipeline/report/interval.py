"""A speedup of several tasks together, with its interval, from the tasks' own speedups and intervals."""

import math
from collections.abc import Iterable
from typing import Final, NamedTuple

import msgspec

__all__ = ["Gain", "Part", "total_gain"]

_HALF_WIDTH: Final = 1.96
"""A 95 % interval is so many standard deviations to each side."""


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
    before = after = variance = 0.0
    for part in parts:
        before += part.before_us
        after += part.after_us
        if 0 < part.gain_low < part.gain_high:
            deviation = math.log(part.gain_high / part.gain_low) / (2 * _HALF_WIDTH)
            variance += (part.after_us * deviation) ** 2
    if before <= 0 or after <= 0:
        return Gain(1.0, 1.0, 1.0)
    spread = math.exp(_HALF_WIDTH * math.sqrt(variance) / after)
    ratio = before / after
    return Gain(ratio, ratio / spread, ratio * spread)
