"""From values to places on an axis, and which values to write beside it."""

import math
from collections.abc import Sequence
from typing import Final, NamedTuple

__all__ = ["LogScale", "log_scale"]

_NICE: Final = (1.0, 2.0, 5.0)
_FINE: Final = (1.0, 1.2, 1.5, 2.0, 2.5, 3.0, 4.0, 5.0, 6.0, 8.0)


class LogScale(NamedTuple):
    """A logarithmic axis.

    Attributes:
        low: Value at `start`.
        high: Value at `end`.
        start: Place of the low end.
        end: Place of the high end.
    """

    low: float
    high: float
    start: float
    end: float

    def place(self, value: float) -> float:
        """Return where a value lies; values outside lie at the ends."""
        clipped = min(max(value, self.low), self.high)
        share = math.log(clipped / self.low) / math.log(self.high / self.low)
        return self.start + share * (self.end - self.start)

    def ticks(self, at_most: int = 6) -> list[float]:
        """Return round values inside the axis: 1, 2, 5 of each decade; more on a short axis, decades on a long one."""
        inside = self._multiples(_NICE)
        if len(inside) > at_most:
            inside = self._multiples((1.0,))
        elif len(inside) < 3:
            inside = self._multiples(_FINE)
        return inside[:: max(1, math.ceil(len(inside) / at_most))]

    def _multiples(self, steps: tuple[float, ...]) -> list[float]:
        decades = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
        values = [float(f"{step}e{decade}") for decade in decades for step in steps]
        return [v for v in values if self.low <= v <= self.high]


def log_scale(values: Sequence[float], start: float, end: float, margin: float = 0.08) -> LogScale:
    """Return an axis over positive values with some room at both ends.

    Args:
        values: What it must hold; none gives an axis from 1 to 10.
        start: Place of the low end.
        end: Place of the high end.
        margin: Room at each end, as a share of the values' span.
    """
    positive = [v for v in values if v > 0]
    low, high = (min(positive), max(positive)) if positive else (1.0, 10.0)
    span = max(math.log(high / low), math.log(1.6))
    middle = math.sqrt(low * high)
    reach = math.exp(span * (0.5 + margin))
    return LogScale(middle / reach, middle * reach, start, end)
