"""What the tuner tells while it runs. Types only; the pipeline draws them and computes the remaining time.

Order: `TuneStarted`, then per task `TaskStarted`, any number of `CandidateDone`, `TaskDone`; then `ChoiceConfirmed` for
every new winner, `StepTimed` for whole programs, `ChoiceConfirmed` for forms that make them faster and `StepTurned` for
what is taken; last `TuneFinished`.
"""

from typing import Literal

import msgspec

from tune_model.tune.candidate import Candidate, Rejected

__all__ = [
    "CandidateDone",
    "ChoiceConfirmed",
    "Event",
    "RecordsDamaged",
    "StepTimed",
    "StepTurned",
    "TaskDone",
    "TaskStarted",
    "TuneFinished",
    "TuneStarted",
]


class TuneStarted(msgspec.Struct, frozen=True, tag="tune started"):
    """Everything is enumerated.

    Attributes:
        tasks: How many.
        candidates: Over all tasks.
        replayed: Tasks whose outcome the records already hold.
        estimate_s: Expected seconds for the rest.
        stale: Tasks among the rest with an outcome from before a driver, a library, the machine's model or the
            measuring code changed: only its finalists are timed again.
    """

    tasks: int
    candidates: int
    replayed: int
    estimate_s: float
    stale: int = 0


class TaskStarted(msgspec.Struct, frozen=True, tag="task started"):
    """A task's race begins.

    Attributes:
        index: From 0, in the order tuned.
        task: Key.
        label: For people.
        candidates: How many compete now.
    """

    index: int
    task: str
    label: str
    candidates: int


class CandidateDone(msgspec.Struct, frozen=True, tag="candidate done"):
    """A candidate was timed, or is out.

    Attributes:
        task: Key.
        candidate: Which.
        median_us: Its time; 0 when it is out.
        best_us: Best so far.
        baseline_us: The extern's time.
        replayed: Taken from the records.
        rejected: Why it is out.
    """

    task: str
    candidate: Candidate
    median_us: float
    best_us: float
    baseline_us: float
    replayed: bool = False
    rejected: Rejected | None = None


class TaskDone(msgspec.Struct, frozen=True, tag="task done"):
    """A task's race is over. Which candidate is used is settled at the end, when all readers of a weight are known.

    Attributes:
        index: From 0, in the order tuned.
        task: Key.
        best: Fastest that beat the extern beyond the noise, else the extern.
        best_us: Its time.
        baseline_us: The extern's.
        seconds: Wall time of this task.
        replayed: Nothing was measured.
        status: As in `Choice`.
    """

    index: int
    task: str
    best: Candidate
    best_us: float
    baseline_us: float
    seconds: float
    replayed: bool
    status: str


class ChoiceConfirmed(msgspec.Struct, frozen=True, tag="choice confirmed"):
    """A winner was measured again, beside the extern, in a fresh process.

    Attributes:
        index: From 0, among those that wait for it now; replacements come in a round of their own.
        total: How many wait.
        task: Key.
        candidate: The winner.
        gain: extern / winner as it showed now.
        held: It is what its final said.
        detail: Why it is not.
    """

    index: int
    total: int
    task: str
    candidate: Candidate
    gain: float
    held: bool
    detail: str = ""


class StepTimed(msgspec.Struct, frozen=True, tag="step timed"):
    """A whole program was timed at a point of its grid, or known from the records.

    Attributes:
        step: `decode batch=1 context=1024`.
        median_us: With all choices.
        baseline_us: With torch's operators everywhere; or, for a task, with all choices but this.
        gain: baseline / all choices.
        task: Key of the task whose choice was taken out; empty for the step as a whole.
    """

    step: str
    median_us: float
    baseline_us: float
    gain: float
    task: str = ""


class StepTurned(msgspec.Struct, frozen=True, tag="step turned"):
    """A whole program is faster when some of its kernels start in another way than the one that was faster alone.

    Attributes:
        step: `decode batch=1 context=1024`.
        median_us: With these forms.
        baseline_us: With the winners of the races.
        gain: baseline / these forms.
        tasks: Keys of the tasks whose kernels they are.
    """

    step: str
    median_us: float
    baseline_us: float
    gain: float
    tasks: tuple[str, ...]


class RecordsDamaged(msgspec.Struct, frozen=True, tag="records damaged"):
    """The records database could not be read and was set aside.

    Attributes:
        moved_to: Where it is now.
        rescued: Rows that were read from it.
    """

    moved_to: str
    rescued: int


class TuneFinished(msgspec.Struct, frozen=True, tag="tune finished"):
    """The end.

    Attributes:
        builds: Kernels built now.
        measured: Measurements taken now.
        seconds: Wall time.
        stopped: Why it ended early; empty when it did not.
        repeated: Measurements that something disturbed, so that they were taken again.
    """

    builds: int
    measured: int
    seconds: float
    stopped: Literal["", "budget", "interrupted"] = ""
    repeated: int = 0


Event = (
    TuneStarted
    | TaskStarted
    | CandidateDone
    | TaskDone
    | ChoiceConfirmed
    | StepTimed
    | StepTurned
    | RecordsDamaged
    | TuneFinished
)
