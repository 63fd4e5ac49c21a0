"""What a records database holds, one kind of fact each. Types only."""

from typing import Final

import msgspec

from tune_model.tune.candidate import Candidate, Rejected
from tune_model.tune.search.descent import Footprint

__all__ = ["KINDS", "Body", "Confirmation", "Finalist", "Outcome", "Refusal", "Row", "StepTiming", "Timing", "Trail"]


class Timing(msgspec.Struct, frozen=True, tag="timing"):
    """One timing of one candidate in a race.

    Attributes:
        candidate: What was timed.
        rung: Of the race's ladder, 0 first; a final and the guard are numbered after the last.
        stage: `race`, `final` or `guard`.
        median_us: Per call.
        low_us: 20th percentile.
        high_us: 80th percentile.
        samples: How many rounds.
        error: Relative Frobenius error against the reference.
        disturbed: Throttling, contention or drift was seen.
    """

    candidate: Candidate
    rung: int
    stage: str
    median_us: float
    low_us: float
    high_us: float
    samples: int
    error: float
    disturbed: bool = False


class Refusal(msgspec.Struct, frozen=True, tag="refusal"):
    """A candidate that is out."""

    candidate: Candidate
    rejected: Rejected


class Finalist(msgspec.Struct, frozen=True):
    """A candidate's result in a final.

    Attributes:
        candidate: The first of a final is the extern.
        layouts: The kernel's demands on weights, as in `Kernel.layouts`.
        median_us: In the final.
        gain: Median of the paired ratios extern / candidate; above 1 the candidate is faster.
        gain_low: Lower end of their 95 % interval.
        gain_high: Upper end.
        complexity: Steps and workspaces of the kernel; of two equally fast ones the simpler wins.
        unconditional: The kernel states no requirement, so it may be a packed weight's fallback.
        doubtful: Other processes were in the way throughout the final: it decides nothing.
    """

    candidate: Candidate
    layouts: tuple[tuple[str, str], ...]
    median_us: float
    gain: float
    gain_low: float
    gain_high: float
    complexity: int
    unconditional: bool
    doubtful: bool = False


class Outcome(msgspec.Struct, frozen=True, tag="outcome"):
    """A finished race.

    Attributes:
        finalists: The extern first, the others fastest first.
        failed: Why the task could not be measured; empty otherwise.
    """

    finalists: tuple[Finalist, ...]
    failed: str = ""


class Confirmation(msgspec.Struct, frozen=True, tag="confirmation"):
    """A winner measured again: beside the extern, in a fresh process, with other inputs (`guard`).

    Attributes:
        candidate: Which.
        median_us: Its time; 0 when it was not timed.
        baseline_us: The extern's in the same rounds.
        gain: Median of the paired ratios extern / candidate; above 1 the candidate is faster.
        gain_low: Lower end of their 95 % interval.
        gain_high: Upper end.
        failed: Why it cannot be used at all; empty otherwise.
        doubtful: Other processes were in the way throughout: it confirms nothing.
    """

    candidate: Candidate
    median_us: float = 0.0
    baseline_us: float = 0.0
    gain: float = 0.0
    gain_low: float = 0.0
    gain_high: float = 0.0
    failed: str = ""
    doubtful: bool = False


class StepTiming(msgspec.Struct, frozen=True, tag="step"):
    """A whole program timed with two sets of kernels in the same rounds (`steps`).

    Attributes:
        baseline_us: With the first set, per run.
        median_us: With the second.
        gain: Median of the paired ratios first / second: above 1 the second is faster.
        gain_low: Lower end of their 95 % interval.
        gain_high: Upper end.
        chance: Of such rounds if the second set is not slower, by the least that counts: small, it surely is.
        doubtful: Other processes were in the way throughout: it decides nothing.
    """

    baseline_us: float
    median_us: float
    gain: float
    gain_low: float
    gain_high: float
    chance: float
    doubtful: bool = False


class Trail(msgspec.Struct, frozen=True, tag="trail"):
    """How one family's configurations were climbed.

    Attributes:
        candidate: The family, without a configuration.
        footprints: In order.
    """

    candidate: Candidate
    footprints: tuple[Footprint, ...]


Body = Timing | Refusal | Outcome | Confirmation | StepTiming | Trail
KINDS: Final = {
    Timing: "timing",
    Refusal: "refusal",
    Outcome: "outcome",
    Confirmation: "confirmation",
    StepTiming: "step",
    Trail: "trail",
}


class Row(msgspec.Struct, frozen=True):
    """A record as it is exported, one JSON line each."""

    key: str
    task: str
    body: Body
