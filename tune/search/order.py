"""In which order, and how many of a sorted space's configurations each effort searches."""

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import TypeVar

from tune_model.tune.candidate import Config, Effort

__all__ = ["LIMITS", "SHORT_BYTES", "interleave", "thin", "with_dependent_launch", "with_prefetch"]

T = TypeVar("T")

LIMITS = {Effort.QUICK: 8, Effort.BALANCED: 40, Effort.THOROUGH: 400}
"""Most configurations per family and task."""


SHORT_BYTES = 8 << 20
"""Weights that an H200 reads in some two microseconds, about what a launch costs."""


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
    yield from _in_forms(configurations, ((("pdl", False),), *([(("pdl", True),)] if offered else ())))


def with_prefetch(configurations: Iterable[Config], *, offered: bool, short: bool = False) -> Iterator[Config]:
    """Give every configuration `pdl` and `prefetch`: neither, and where `offered` both, or the first alone.

    Args:
        configurations: Most promising first.
        offered: The device and the task allow dependent launches.
        short: The kernel is little longer than a launch, so that both come first.
    """
    forms: list[Config] = [(("pdl", False), ("prefetch", False))]
    if offered:
        forms += [(("pdl", True), ("prefetch", True)), (("pdl", True), ("prefetch", False))]
    if short and offered:
        forms = [forms[1], forms[0], forms[2]]
    yield from _in_forms(configurations, forms)


def _in_forms(configurations: Iterable[Config], forms: Sequence[Config]) -> Iterator[Config]:
    """Yield configurations in their first form, and after every second one the next that waits for another form."""
    first, *others = forms
    waiting: list[Config] = []
    later: list[Config] = []
    for place, config in enumerate(configurations):
        yield (*config, *first)
        if others:
            waiting.append((*config, *others[0]))
            later += [(*config, *form) for form in others[1:]]
            if place % 2:
                yield waiting.pop(0)
            if place % 4 == 3 and later:
                yield later.pop(0)
    yield from waiting
    yield from later


def interleave(main: Iterable[T], other: Iterable[T], every: int) -> Iterator[T]:
    """Yield all of `main` in order, after each `every` of them one of `other`, then what is left of `other`."""
    rest = iter(other)
    for place, item in enumerate(main, 1):
        yield item
        if place % every == 0:
            yield from islice(rest, 1)
    yield from rest
