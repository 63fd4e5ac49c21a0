"""In which order, and how many of a sorted space's configurations each effort searches."""

from collections.abc import Iterable, Iterator
from itertools import islice

from tune_model.tune.candidate import Config, Effort

__all__ = ["LIMITS", "thin", "with_dependent_launch"]

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


def with_dependent_launch(configurations: Iterable[Config], *, offered: bool) -> Iterator[Config]:
    """Give every configuration the parameter `pdl`: off, and where `offered` on as well.

    A configuration's second form comes about twice as far down the list as its first, so that a short search still
    sees different tiles.
    """
    waiting: list[Config] = []
    for place, config in enumerate(configurations):
        yield (*config, ("pdl", False))
        if offered:
            waiting.append((*config, ("pdl", True)))
            if place % 2:
                yield waiting.pop(0)
    yield from waiting
