"""What a verification says: one value per thing that was looked at."""

from typing import Literal

import msgspec

__all__ = ["Check", "Outcome"]

Outcome = Literal["passed", "failed", "noted", "skipped"]
"""`noted`: differs, but is allowed to. `skipped`: could not be looked at, `seen` says why."""


class Check(msgspec.Struct, frozen=True):
    """One thing that was looked at.

    Attributes:
        name: What.
        outcome: How it went.
        seen: What was there.
        expected: What should be there.
    """

    name: str
    outcome: Outcome
    seen: str
    expected: str
