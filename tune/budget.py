"""A run's time: how much there is, what is kept back for the guard, and which share a race may take.

    |---------------- search ----------------|--- guard ---|-- 10 % overdraft --|
    start                                                budget              everything stops

Races get shares in proportion to what they may gain; what one leaves goes to those after it.
"""

import math
import time
from collections.abc import Callable
from typing import Final

__all__ = ["Budget"]

_OVERDRAFT: Final = 1.1
"""Part of the budget after which the guard stops as well; what is left to do then takes a moment."""

_RESERVE_AT_MOST: Final = 0.4
"""Of the budget: a search that leaves all its time to the guard has nothing to confirm."""

_LEAST_RACES: Final = 2.0
"""A race gets at least the time of so many openings and finals, or it would end before it has timed anything."""


class Budget:
    """The time of one run.

    Attributes:
        seconds: All of it; infinite without a limit.
        started: When the clock began, in the clock's seconds.
    """

    def __init__(self, seconds: float | None, clock: Callable[[], float] = time.monotonic) -> None:
        """Start the clock."""
        self.seconds = math.inf if seconds is None else seconds
        self.clock = clock
        self.started = clock()
        self._slice_ends = math.inf
        self._first_open_s = 0.0
        self._open_s = 0.0
        self._final_s = 0.0
        self._unconfirmed: set[str] = set()

    @property
    def is_limited(self) -> bool:
        """There is an end."""
        return self.seconds != math.inf

    @property
    def spent_s(self) -> float:
        """Seconds since the start."""
        return self.clock() - self.started

    @property
    def search_left_s(self) -> float:
        """Seconds until the search has to leave the rest to the guard; negative afterwards."""
        return self.seconds - self._reserve_s() - self.spent_s

    @property
    def is_searched_out(self) -> bool:
        """No further race may begin."""
        return self.search_left_s <= 0

    @property
    def is_spent(self) -> bool:
        """The race at hand should come to its end: the search is over, or its share is used up."""
        return self.is_searched_out or self.clock() >= self._slice_ends

    @property
    def left_s(self) -> float:
        """Seconds until nothing at all may be measured any more; negative afterwards."""
        return _OVERDRAFT * self.seconds - self.spent_s

    def allot(self, value: float, rest: float) -> None:
        """Give the race that begins now its share.

        Args:
            value: What it may gain.
            rest: What it and all races still to come may gain together.
        """
        if not self.is_limited:
            return
        part = value / rest if rest > 0 else 1.0
        least = _LEAST_RACES * (self._open_s + self._final_s)
        self._slice_ends = self.clock() + max(self.search_left_s * part, least)

    def note_open(self, seconds: float) -> None:
        """Remember how long opening a task took; the first time includes the start of a process."""
        if self._first_open_s == 0.0:
            self._first_open_s = seconds
        else:
            self._open_s = max(self._open_s, seconds)

    def note_final(self, seconds: float, contenders: int) -> None:
        """Remember how long a final took, as if it had been between two."""
        self._final_s = max(self._final_s, seconds * 2 / max(contenders, 2))

    def note_winner(self, task: str, *, is_confirmed: bool) -> None:
        """Remember whether the guard will have a task's winner to confirm; what is told last counts."""
        if is_confirmed:
            self._unconfirmed.discard(task)
        else:
            self._unconfirmed.add(task)

    def _reserve_s(self) -> float:
        """Return the seconds that the guard will need: a process, then every winner opened, checked and timed."""
        if not self._unconfirmed or not self.is_limited:
            return 0.0
        needed = self._first_open_s + len(self._unconfirmed) * (self._open_s + self._final_s)
        return min(needed, _RESERVE_AT_MOST * self.seconds)
