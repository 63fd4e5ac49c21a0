"""How many configurations of a sorted space each effort searches."""

from collections.abc import Iterable, Iterator
from itertools import islice

from tune_model.tune.candidate import Config, Effort

__all__ = ["LIMITS", "thin"]

LIMITS = {Effort.QUICK: 8, Effort.BALANCED: 40, Effort.THOROUGH: 400}
"""Most configurations per family and task."""


def thin(configurations: Iterable[Config], effort: Effort, share: float = 1.0) -> Iterator[Config]:
    """Yield the first configurations, as many as the effort allows one family.

    Args:
        configurations: Most promising first.
        effort: How much to search.
        share: Part of the limit this family may use.
    """
    return islice(configurations, max(1, round(LIMITS[effort] * share)))
