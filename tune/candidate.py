"""What can compete for a task: families of candidates, and the one interface that all of them implement.

Each family states, in one file: which tasks it accepts and why not, its configurations for a task and target, and how a
configuration becomes machine code and launch facts. A family is a module-level object without state, importable in a
build process by its name. Failure is a value (`Rejected`), never an exception.
"""

from collections.abc import Iterator
from enum import StrEnum
from typing import Final, Protocol, get_args

import msgspec

from tune_model.extract.task import Task
from tune_model.runtime.kernel import Kernel
from tune_model.runtime.program import FormKind
from tune_model.tune.target import Target

__all__ = [
    "ALL_KINDS",
    "REASONS",
    "TRANSIENT_REASONS",
    "Built",
    "Candidate",
    "Config",
    "Effort",
    "Family",
    "Rejected",
    "label",
]

ALL_KINDS: Final[frozenset[FormKind]] = frozenset(get_args(FormKind))

REASONS: Final = frozenset(
    {
        "unsupported",
        "shared memory",
        "registers",
        "spills",
        "compiler",
        "timeout",
        "crash",
        "out of memory",
        "launch",
        "wrong",
        "variant",
        "stray write",
        "processes",
        "output",
        "guard",
        "layout",
        "step",
    }
)
"""Why a candidate may be out (docs/artifact.md says what each means); the last three are about winners."""

TRANSIENT_REASONS: Final = frozenset({"timeout", "crash", "out of memory"})
"""Of a `Rejected`: what a busy machine or a full memory may cause as well as the candidate. Such a failure costs a
candidate the run at hand; the next one tries it again."""

Config = tuple[tuple[str, int | float | str | bool], ...]
"""A family's parameters in a fixed order: `(("block_n", 1), ("block_k", 2048))`."""


class Effort(StrEnum):
    """How much of the space is searched."""

    QUICK = "quick"
    BALANCED = "balanced"
    THOROUGH = "thorough"


class Candidate(msgspec.Struct, frozen=True):
    """One configuration of one family; with the task, target and the family's source it determines the kernel."""

    family: str
    config: Config = ()


class Built(msgspec.Struct, frozen=True):
    """A candidate as machine code.

    Attributes:
        kernel: Launch facts; names code by SHA-256.
        code: The code, by the same hash. Empty for candidates made of ATen calls.
        registers: Per thread, the largest of its launches; 0 where it does not apply.
        spill_bytes: Local memory per thread.
        build_s: Seconds the compiler took.
    """

    kernel: Kernel
    code: dict[str, bytes]
    registers: int = 0
    spill_bytes: int = 0
    build_s: float = 0.0


class Rejected(msgspec.Struct, frozen=True):
    """Why a candidate is out: a kind to count by, and the numbers.

    Attributes:
        reason: One of `REASONS`; `abandoned`, which no record has, when the whole run had to end.
        detail: Seen and expected: `needs 245760 bytes, limit 232448`.
    """

    reason: str
    detail: str


class Family(Protocol):
    """A way to implement tasks.

    Attributes:
        name: Unique, a valid identifier; stored in records and artifacts.
        version: Bumped when built code or launch facts change for an unchanged configuration. Together with a hash
            of the family's source files it guards the records.
        kinds: Of forms that it is about. It is not asked about others, so that a task's rejections list only what
            could have been.
    """

    name: str
    version: int
    kinds: frozenset[FormKind]

    def accepts(self, task: Task, target: Target) -> Rejected | None:
        """Say whether this family can implement the task at all; `None` means yes."""
        ...

    def start(self, task: Task, target: Target) -> Config:
        """Return the heuristic configuration, the one to try first (and where coordinate descent begins)."""
        ...

    def configurations(self, task: Task, target: Target, effort: Effort) -> Iterator[Config]:
        """Yield every configuration worth building, most promising first; the first is `start`."""
        ...

    def build(self, task: Task, config: Config, target: Target) -> Built | Rejected:
        """Make machine code and launch facts. Needs no device; runs in a build process."""
        ...


def label(candidate: Candidate) -> str:
    """Return a candidate for people: `triton_gemv(block_n=1, block_k=2048)`."""
    return (
        f"{candidate.family}({', '.join(f'{k}={v}' for k, v in candidate.config)})"
        if candidate.config
        else candidate.family
    )
