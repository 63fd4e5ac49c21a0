"""Statistics of times, the only ones of this project: a ratio of paired times with its interval, and what follows.

Every ratio, of a race, a second look, a whole step, `bench` or a benchmark, is that of the sign test (`paired_ratio`).
Where several are added up, or compared with each other, their intervals are taken for those of normal errors of the
logarithm (`log_deviation`), and independent errors' variances add up.
"""

import math
from collections.abc import Iterable, Sequence
from typing import Final

import msgspec

__all__ = [
    "FEWEST_PAIRS",
    "SIGMAS_95",
    "Ratio",
    "bounds",
    "chance_of_fewer",
    "drifted",
    "log_deviation",
    "log_deviation_of_sum",
    "paired_ratio",
    "percentile",
    "significant",
]

FEWEST_PAIRS: Final = 6
"""With fewer even the range of all pairs is no 95 % interval: two of 2**5 outcomes miss it, which is 6 %."""

SIGMAS_95: Final = 1.96
"""A 95 % interval of normal errors is so many standard deviations to each side."""


class Ratio(msgspec.Struct, frozen=True):
    """A ratio of paired times: its median and a 95 % interval."""

    median: float
    low: float
    high: float


def percentile(values: Sequence[float], fraction: float) -> float:
    """Return a percentile, interpolated linearly.

    Raises:
        ValueError: No values.
    """
    if not values:
        raise ValueError("a percentile of no values")
    ordered = sorted(values)
    place = fraction * (len(ordered) - 1)
    below = math.floor(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)


def paired_ratio(numerator: Sequence[float], denominator: Sequence[float]) -> Ratio:
    """Return the median of paired ratios and its 95 % interval from order statistics.

    The interval is that of the sign test: it holds whatever the distribution of the noise, and one wild sample does not
    widen it. Fewer than `FEWEST_PAIRS` carry no 95 % statement: the interval is then all pairs.
    """
    ratios = sorted(a / b for a, b in zip(numerator, denominator, strict=True))
    rank = _rank(len(ratios))
    return Ratio(percentile(ratios, 0.5), ratios[rank], ratios[len(ratios) - 1 - rank])


def chance_of_fewer(numerator: Sequence[float], denominator: Sequence[float], bound: float) -> float:
    """Return how likely so few pairs reach a bound, or fewer, if the median of their ratio does (sign test, one-sided).

    The less likely, the surer the ratio lies below.
    """
    ratios = [a / b for a, b in zip(numerator, denominator, strict=True)]
    reached = sum(ratio >= bound for ratio in ratios)
    return sum(math.comb(len(ratios), k) for k in range(reached + 1)) * 0.5 ** len(ratios)


def significant(chances: Sequence[float], level: float = 0.05) -> tuple[bool, ...]:
    """Say which of several findings hold, so that all do in 95 % of cases (Holm): each asked alone errs too often.

    Args:
        chances: Of each to come about without a cause.
        level: How often at least one of those returned as `True` may be none.
    """
    found = [False] * len(chances)
    for place, index in enumerate(sorted(range(len(chances)), key=lambda i: chances[i])):
        if chances[index] > level / (len(chances) - place):
            break
        found[index] = True
    return tuple(found)


def log_deviation(low: float, high: float) -> float:
    """Return the standard deviation of a ratio's logarithm that its 95 % interval tells; 0 for an empty interval."""
    return math.log(high / low) / (2 * SIGMAS_95) if 0 < low < high else 0.0


def log_deviation_of_sum(parts: Iterable[tuple[float, float]]) -> float:
    """Return the standard deviation of the logarithm of a sum of times that were measured apart from each other.

    Args:
        parts: Of each summand its time and the standard deviation of its logarithm; small against 1.
    """
    total = variance = 0.0
    for time, deviation in parts:
        total += time
        variance += (time * deviation) ** 2
    return math.sqrt(variance) / total if total > 0 else 0.0


def bounds(ratio: float, deviation: float, sigmas: float = SIGMAS_95) -> tuple[float, float]:
    """Return the interval of so many standard deviations of the logarithm to each side; 95 % by default."""
    spread = math.exp(sigmas * deviation)
    return ratio / spread, ratio * spread


def drifted(us: Sequence[float], limit: float = 0.05) -> bool:
    """Say whether the second half of the samples differs from the first by more than `limit`."""
    half = len(us) // 2
    if half < 3:
        return False
    first, second = percentile(us[:half], 0.5), percentile(us[half:], 0.5)
    return abs(first - second) > limit * min(first, second)


def _rank(count: int) -> int:
    """Return the largest rank (from 0) such that both tails outside hold at most 5 %."""
    tail = 0.0
    for rank in range(count // 2):
        tail += math.comb(count, rank) * 0.5**count
        if 2 * tail > 0.05:
            return max(rank - 1, 0)
    return 0
