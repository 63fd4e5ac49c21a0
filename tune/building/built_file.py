"""One built candidate as one file, so that a kernel built on one machine can be tried on another."""

from pathlib import Path

import msgspec

from tune_model.extract.task import Task
from tune_model.tune.candidate import Built, Candidate, Rejected, label
from tune_model.tune.families import family_named
from tune_model.tune.target import Target

__all__ = ["BuiltFile", "build_candidate", "write_built"]


class BuiltFile(msgspec.Struct, frozen=True):
    """A task, a candidate for it, and what building gave."""

    task: Task
    candidate: Candidate
    built: Built


def build_candidate(task: Task, candidate: Candidate, target: Target, path: Path | None = None) -> Built | Rejected:
    """Build one candidate in this process.

    Args:
        task: What it is for.
        candidate: Family and configuration; an empty configuration means the family's own start.
        target: Machine to build for; need not be this one.
        path: Where to write it; nothing is written for a rejected one.
    """
    family = family_named(candidate.family)
    refusal = family.accepts(task, target)
    if refusal is not None:
        return Rejected(refusal.reason, f"{label(candidate)}: {refusal.detail}")
    config = candidate.config or family.start(task, target)
    built = family.build(task, config, target)
    if path is not None and isinstance(built, Built):
        write_built(path, BuiltFile(task, Candidate(candidate.family, config), built))
    return built


def write_built(path: Path, content: BuiltFile) -> None:
    """Write a built candidate."""
    path.write_bytes(msgspec.json.encode(content))
