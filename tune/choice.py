"""What tune returns: per task the winner, the baseline, every measurement and every rejection.

Types only.
"""

from typing import Final, Literal

import msgspec

from tune_model.extract.task import Plan
from tune_model.runtime.kernel import Kernel
from tune_model.tune.candidate import Candidate, Rejected
from tune_model.tune.records.facts import Trail
from tune_model.tune.target import Target

__all__ = ["STATUSES", "Choice", "Measurement", "Tuning", "WholeStep"]

STATUSES: Final = frozenset(
    {"tuned", "no gain", "layout", "invariant", "disturbed", "unconfirmed", "not searched", "failed"}
)
"""How a task may end; `failed` goes on with a colon and why."""


class Measurement(msgspec.Struct, frozen=True, omit_defaults=True):
    """One timing of one candidate.

    Attributes:
        candidate: What was timed.
        median_us: Per call.
        low_us: 20th percentile.
        high_us: 80th percentile.
        samples: How many rounds.
        stage: `race` (successive halving or a step of coordinate descent), `final` (interleaved with the baseline) or
            `guard` (so too, but afterwards, in a fresh process and with other inputs).
        error: Relative Frobenius error against the reference.
        disturbed: Throttling, contention or drift was seen while timing.
    """

    candidate: Candidate
    median_us: float
    low_us: float
    high_us: float
    samples: int
    stage: str
    error: float = 0.0
    disturbed: bool = False


class Choice(msgspec.Struct, frozen=True):
    """The outcome for one task.

    Attributes:
        task: Its key.
        winner: The chosen candidate, the extern (`aten`) unless it was beaten beyond the noise.
        kernel: The winner's launch facts.
        median_us: The winner's time when it was measured again after its final; of an extern that stays, in the final.
        baseline_us: The extern's time beside it.
        gain_low: Lower end of the 95 % interval of baseline / winner.
        gain_high: Upper end.
        measurements: In the order taken.
        rejections: Every candidate that was out, and why.
        status: One of `STATUSES`: `tuned`; `no gain` (extern stays); `layout` (the winner is chosen for what its
            weight's layout gains elsewhere); `invariant` (one configuration for every size, as the rules ask);
            `disturbed` (extern stays: other processes kept the machine too busy to decide); `unconfirmed` (extern
            stays: the run ended before the winner was measured again); `not searched` (budget); or `failed: ...`.
        trails: Footprints of every coordinate descent, by family.
    """

    task: str
    winner: Candidate
    kernel: Kernel
    median_us: float
    baseline_us: float
    gain_low: float
    gain_high: float
    measurements: tuple[Measurement, ...]
    rejections: tuple[tuple[Candidate, Rejected], ...]
    status: str
    trails: tuple[Trail, ...] = ()


class WholeStep(msgspec.Struct, frozen=True):
    """A whole program at one point of its grid, timed with torch's operators everywhere and with all choices.

    Attributes:
        program: Its name.
        point: Value of each of the grid's sizes.
        median_us: With all choices.
        baseline_us: With torch's operators, in the same rounds.
        gain_low: Lower end of the 95 % interval of baseline / tuned.
        gain_high: Upper end.
    """

    program: str
    point: tuple[tuple[str, int], ...]
    median_us: float
    baseline_us: float
    gain_low: float
    gain_high: float


class Tuning(msgspec.Struct, frozen=True):
    """The outcome for a whole plan.

    Attributes:
        plan: As extracted, with weight layouts settled (`Pack` and `Transpose` added to `Program.weights`).
        target: The machine it was tuned on.
        choices: One per task, in the plan's order.
        code: Machine code of every winner, by SHA-256.
        builds: How many kernels were built now (0 when everything was replayed).
        measured: How many measurements were taken now.
        seconds: Wall time.
        stopped: `budget` or `interrupted` when some tasks were left `not searched` or `unconfirmed`.
        repeated: Measurements that something disturbed, so that they were taken again.
        steps: Whole programs, where they were timed and a choice differs from the extern.
    """

    plan: Plan
    target: Target
    choices: tuple[Choice, ...]
    code: dict[str, bytes]
    builds: int
    measured: int
    seconds: float
    stopped: Literal["", "budget", "interrupted"] = ""
    repeated: int = 0
    steps: tuple[WholeStep, ...] = ()
