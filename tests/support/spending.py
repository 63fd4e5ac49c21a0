"""What a piece of work costs, counted so that the answer is the same on a slow or busy machine."""

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

CALLS_AT_MOST = 6_000_000
"""A second or two of Python; what grows as a power of a document's size is far beyond."""

CPU_SECONDS_AT_MOST = 20.0
"""Ten times what any document may cost, for work that makes no calls."""


class Spent:
    """What was spent.

    Attributes:
        calls: Functions called in this thread, Python's and C's.
        cpu_s: Seconds on a core, of all threads; time spent waiting for one does not count.
    """

    calls = 0
    cpu_s = 0.0


@contextmanager
def spending() -> Iterator[Spent]:
    """Count what the body spends."""
    spent = Spent()

    def count(_frame: FrameType, event: str, _argument: Any) -> None:
        if event in {"call", "c_call"}:
            spent.calls += 1

    before = sys.getprofile()
    began = time.process_time()
    sys.setprofile(count)
    try:
        yield spent
    finally:
        sys.setprofile(before)
        spent.cpu_s = time.process_time() - began
