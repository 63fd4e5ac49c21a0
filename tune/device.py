"""What the tuner asks of a device, in messages: open a task, check candidates, time them, compare them.

`workbench` does it in this process, `worker` in a process of its own that may die, `tests` with recorded numbers.
Types and the interface only.
"""

from typing import Protocol

import msgspec

from tune_model.extract.task import Task
from tune_model.tune.candidate import Built, Candidate, Rejected
from tune_model.tune.measuring.policy import Policy, Rung

__all__ = ["Bench", "Device", "Passed", "Samples"]


class Bench(msgspec.Struct, frozen=True):
    """A task on the device: its inputs, reference and baseline.

    Attributes:
        task: What is tuned.
        policy: How times are taken.
        baseline: The extern as code.
        seed: Of the random inputs.
    """

    task: Task
    policy: Policy
    baseline: Built
    seed: int


class Passed(msgspec.Struct, frozen=True):
    """A candidate computed the right values.

    Attributes:
        error: Relative Frobenius error against the reference, the largest of its results.
    """

    error: float


class Samples(msgspec.Struct, frozen=True):
    """Times of one candidate.

    Attributes:
        us: Microseconds per call, one for each sample in the order taken.
        disturbed: Throttling, contention or drift was seen meanwhile.
        doubtful: Other processes were in the way so much that nothing should be decided by these times.
    """

    us: tuple[float, ...]
    disturbed: bool = False
    doubtful: bool = False


class Device(Protocol):
    """One device, one open task at a time. Failure of a candidate is a value."""

    def open(self, bench: Bench) -> Passed | Rejected:
        """Make inputs and the reference, and check the baseline (its error sets the tolerance).

        Returns:
            The baseline's error; `Rejected` when the task cannot be measured here at all (out of memory, say).
        """
        ...

    def check(self, candidate: Candidate, built: Built) -> Passed | Rejected:
        """Load a candidate and compare its results with the reference."""
        ...

    def time(self, candidate: Candidate, built: Built, rung: Rung) -> Samples | Rejected:
        """Time a checked candidate alone."""
        ...

    def compare(
        self, candidates: tuple[tuple[Candidate, Built], ...], rung: Rung
    ) -> tuple[Samples | Rejected, ...] | Rejected:
        """Time checked candidates in interleaved rounds, in random order within a round: sample `i` of each is a pair.

        The first is the extern; the others' values are compared with the reference once more afterwards. If one fails,
        its place holds the reason and the others' places hold what they have (maybe nothing). Where it cannot be told
        who it was there is one reason for all of them, and it says nothing about any single one.
        """
        ...

    def finish(self) -> None:
        """Free what belongs to the open task."""
        ...

    def close(self) -> None:
        """Give the device back; `open` takes it again, in a new process where it has one of its own."""
        ...
