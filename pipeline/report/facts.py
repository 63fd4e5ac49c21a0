"""What a report says, as values: the JSON form of a report is exactly this. Types only; `gather` fills them in.

Times are microseconds, sizes bytes. `before` is the plain operators, `after` the winners.
"""

from typing import Literal

import msgspec

from tune_model.package.memory import MemoryPlan
from tune_model.pipeline.report.interval import Gain
from tune_model.pipeline.report.roofline import Roofs

__all__ = [
    "CandidateFacts",
    "FootprintFacts",
    "KindFacts",
    "Missing",
    "PhaseFacts",
    "PointFacts",
    "RejectionFacts",
    "ReportFacts",
    "SkippedFacts",
    "StepTime",
    "TaskFacts",
    "Totals",
    "WholeFacts",
]


class CandidateFacts(msgspec.Struct, frozen=True):
    """One candidate of a race, in the order first timed.

    Attributes:
        label: `triton_gemv(block_n=1, block_k=2048)`.
        family: `triton_gemv`.
        race_us: Its times in the race, one per rung it reached.
        final_us: In the final, interleaved with the others; `None` if it did not get there.
        guard_us: Measured again in a fresh process beside the plain operators; `None` if it was not.
        low_us: 20th percentile of its last timing.
        high_us: 80th percentile.
        error: Relative, against float64.
        disturbed: Throttling, contention or drift was seen in a timing.
    """

    label: str
    family: str
    race_us: tuple[float, ...]
    final_us: float | None
    guard_us: float | None
    low_us: float
    high_us: float
    error: float
    disturbed: bool

    @property
    def us(self) -> float:
        """Its time as well as it is known."""
        known = [us for us in (self.guard_us, self.final_us) if us is not None]
        return known[0] if known else self.race_us[-1] if self.race_us else 0.0


class FootprintFacts(msgspec.Struct, frozen=True):
    """One step of a coordinate descent.

    Attributes:
        family: Whose configurations were climbed.
        descent: 0 for the first, then one more for each restart.
        at: Label of the candidate it stood on.
        at_us: Its time; `None` when it was out.
        tried: How many candidates were asked for the first time here.
        around: `neighbours` (one parameter), `diagonals` (two at once) or `switches` (of the fastest).
        to: Label of where it went; empty when nothing around was faster.
        moved: What changed on the way: `num_warps 4 -> 8`.
    """

    family: str
    descent: int
    at: str
    at_us: float | None
    tried: int
    around: str
    to: str
    moved: str


class TaskFacts(msgspec.Struct, frozen=True):
    """One task.

    Attributes:
        key: Of the task.
        label: For people.
        kind: `matmul`, `reduction`, `pointwise`, `attention`.
        dtype: It computes with.
        weight: Occurrences times the phases' weight.
        sites: Where it occurs: `decode batch=1 context=1024 x32`.
        winner: Candidate.
        family: The winner's.
        after_us: The winner's time per call.
        before_us: The plain operators', in the same final.
        gain: before / after.
        floor_us: Least time at the best rates seen.
        bound: Which roof it meets first.
        share: Of the weighted time of all tasks, 0 to 1, with the winners; 0 for a disturbed task.
        share_before: The same with the plain operators.
        status: As in `tune.choice.Choice`.
        flops: Of one call.
        size_bytes: Least traffic of one call.
        race: Every candidate that was timed.
        footprints: Steps of its coordinate descents; empty when its candidates were a list.
        rejected: Candidates that were out, counted by reason, most frequent first.
    """

    key: str
    label: str
    kind: str
    dtype: str
    weight: float
    sites: tuple[str, ...]
    winner: str
    family: str
    after_us: float
    before_us: float
    gain: Gain
    floor_us: float
    bound: Literal["memory", "compute"]
    share: float
    share_before: float
    status: str
    flops: int
    size_bytes: int
    race: tuple[CandidateFacts, ...]
    footprints: tuple[FootprintFacts, ...]
    rejected: dict[str, int]


class StepTime(msgspec.Struct, frozen=True):
    """A whole step as a benchmark timed it: one contender at one grid point, milliseconds."""

    name: str
    median_ms: float
    low_ms: float
    high_ms: float


class WholeFacts(msgspec.Struct, frozen=True):
    """The step as a whole, as it was timed while tuning: launches, gaps and operators that are not tuned included."""

    before_us: float
    after_us: float
    gain: Gain


class PointFacts(msgspec.Struct, frozen=True):
    """One grid point of a phase.

    Attributes:
        phase: Of the workload.
        point: `batch=1 context=1024`.
        before_us: Sum of its tasks' times with the plain operators.
        after_us: With the winners.
        floor_us: Of their floors.
        gain: before / after.
        whole: The step as a whole; `None` where it was not timed.
        steps: The whole step as `tune-model bench` timed it, the tuned model first; empty without a benchmark.
    """

    phase: str
    point: str
    before_us: float
    after_us: float
    floor_us: float
    gain: Gain
    whole: WholeFacts | None
    steps: tuple[StepTime, ...]


class KindFacts(msgspec.Struct, frozen=True):
    """All tasks of one kind: weighted times."""

    kind: str
    tasks: int
    before_us: float
    after_us: float


class RejectionFacts(msgspec.Struct, frozen=True):
    """Candidates that were out for one reason.

    Attributes:
        reason: `spills`, `wrong`, `unsupported`, ...
        count: Over all tasks.
        families: How many of each family, most first.
        example: One of the details.
    """

    reason: str
    count: int
    families: dict[str, int]
    example: str


class PhaseFacts(msgspec.Struct, frozen=True):
    """What a phase covers.

    Attributes:
        name: Of the phase.
        ranges: Sizes that may differ between calls: name, least, most.
        grid: Values that were tuned.
        regions: Steps that run tuned kernels.
        calls: Steps that are plain operator calls.
        forms: Distinct forms.
    """

    name: str
    ranges: tuple[tuple[str, int, int], ...]
    grid: dict[str, tuple[int, ...]]
    regions: int
    calls: int
    forms: int


class SkippedFacts(msgspec.Struct, frozen=True):
    """Steps that stay plain calls."""

    program: str
    op: str
    count: int
    reason: str


class Missing(msgspec.Struct, frozen=True):
    """Sizes a deployment asked for that are not tuned: what runs there, and how often they were asked for."""

    phase: str
    point: str
    runs: int
    near: int
    plain: int
    nearest: str


class Totals(msgspec.Struct, frozen=True):
    """The whole workload. Disturbed tasks are in no sum of times: theirs can be a thousand times too long.

    Attributes:
        before_us: Weighted time of all tasks with the plain operators.
        after_us: With the winners.
        floor_us: At the best rates seen.
        gain: before / after.
        tasks: How many.
        statuses: How many of each status; failures together as `failed`.
        candidates: Timed, over all tasks.
        measurements: Timings taken.
        disturbed: Timings that something disturbed.
        rejected: Candidates that were out.
    """

    before_us: float
    after_us: float
    floor_us: float
    gain: Gain
    tasks: int
    statuses: dict[str, int]
    candidates: int
    measurements: int
    disturbed: int
    rejected: int


class ReportFacts(msgspec.Struct, frozen=True):
    """Everything a report says.

    Attributes:
        name: Of the model.
        architecture: Class of the model, if known.
        task: `causal-lm`, `encoder`, `forward`.
        dtype: Of weights and activations.
        parameters: Elements of all weights.
        weight_bytes: Their size.
        target: Name of the machine.
        environment: What it was tuned with: (name, value).
        memory: What it will occupy when it is served, in bytes.
        totals: The whole workload.
        points: Per grid point.
        kinds: Per kind of task, largest first.
        tasks: Largest share first.
        roofs: The best rates seen.
        rejections: By reason, most frequent first.
        phases: What is covered.
        skipped: What stays plain calls.
        missing: Sizes that a server asked for in vain; empty without a miss file.
        notes: How it was traced.
    """

    name: str
    architecture: str | None
    task: str
    dtype: str
    parameters: int
    weight_bytes: int
    target: str
    environment: tuple[tuple[str, str], ...]
    memory: MemoryPlan
    totals: Totals
    points: tuple[PointFacts, ...]
    kinds: tuple[KindFacts, ...]
    tasks: tuple[TaskFacts, ...]
    roofs: Roofs
    rejections: tuple[RejectionFacts, ...]
    phases: tuple[PhaseFacts, ...]
    skipped: tuple[SkippedFacts, ...]
    missing: tuple[Missing, ...]
    notes: tuple[str, ...]
