"""Statistics of times: percentiles, and an interval for a ratio that assumes no distribution."""

import math
from collections.abc import Sequence

import msgspec

__all__ = ["Ratio", "drifted", "paired_ratio", "percentile"]


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
    widen it. Fewer than six pairs carry no 95 % statement: the interval is then all pairs.
    """
    ratios = sorted(a / b for a, b in zip(numerator, denominator, strict=True))
    rank = _rank(len(ratios))
    return Ratio(percentile(ratios, 0.5), ratios[rank], ratios[len(ratios) - 1 - rank])


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
