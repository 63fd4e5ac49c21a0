"""In which order, and how many of a sorted space's configurations each effort searches."""

from collections.abc import Iterable, Iterator
from itertools import islice
from typing import TypeVar

from tune_model.tune.candidate import Config, Effort

__all__ = ["LIMITS", "interleave", "thin", "with_dependent_launch"]

T = TypeVar("T")

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


def interleave(main: Iterable[T], other: Iterable[T], every: int) -> Iterator[T]:
    """Yield all of `main` in order, after each `every` of them one of `other`, then what is left of `other`."""
    rest = iter(other)
    for place, item in enumerate(main, 1):
        yield item
        if place % every == 0:
            yield from islice(rest, 1)
    yield from rest
