"""What a build and a measurement depend on, as keys: everything that can change the result, and nothing else.

No path, host name, user or environment variable reaches a key. Every field of a target is classified here, and a field
that is not is refused, so that a new one cannot be forgotten silently.

A machine has two fingerprints. What *must match to run* decides which machine code there can be at all. The rest *must
match to stay optimal*, with the code that measures: where that has changed, an old outcome is `stale`, and says which
few candidates to time again.
Times themselves hold as long as everything holds that they depend on: all of the hardware, and of the libraries those
that the family uses.
"""

import hashlib
from typing import Final

import msgspec

from tune_model.tune.candidate import Candidate, Effort
from tune_model.tune.target import Target

__all__ = [
    "FamilySource",
    "build_key",
    "confirmation_key",
    "kindred_key",
    "measurement_key",
    "race_key",
    "step_key",
    "target_key",
]

_SHAPES_CODE: Final = {
    "CudaTarget": {"arch", "sm_count", "l2_bytes", "shared_bytes", "registers_per_sm", "torch", "triton"},
    "CpuTarget": {"machine", "isa", "threads", "l2_bytes", "l3_bytes", "compiler", "torch"},
}
"""Fields that a family may read while it builds."""

_SHAPES_TIME_ONLY: Final = {
    "CudaTarget": {"name", "memory_bytes", "max_clock_mhz", "driver_branch", "cublas"},
    "CpuTarget": {"name"},
}
"""Fields that change how fast code runs, or what a library does, but not the code that is built."""

_MUST_MATCH_TO_RUN: Final = {"CudaTarget": {"arch"}, "CpuTarget": {"machine", "isa"}}
"""The first fingerprint; the second is all the rest."""

_LIBRARIES: Final = {"CudaTarget": {"cublas", "torch", "triton"}, "CpuTarget": {"compiler", "torch"}}
"""Fields that are versions of software. The others are the machine's, and its driver's: all times depend on them."""

_USED: Final = {
    "aten": {"cublas", "torch"},
    "aten_addition": {"cublas", "torch"},
    "aten_parts": {"cublas", "torch"},
    "aten_transposed": {"cublas", "torch"},
    "cpp_gemv": {"compiler"},
    "cpp_pointwise": {"compiler"},
    "cpp_rows": {"compiler"},
    "cublaslt": {"cublas", "triton"},
    "library_halves": {"compiler", "cublas", "torch", "triton"},
    "mkl_linear": {"torch"},
    "mkldnn_linear": {"torch"},
    "sdpa": {"cublas", "torch", "triton"},
    "triton_decode_attention": {"triton"},
    "triton_flash_attention": {"triton"},
    "triton_gemv": {"triton"},
    "triton_matmul": {"triton"},
    "triton_persistent": {"triton"},
    "triton_pointwise": {"triton"},
    "triton_rows": {"triton"},
    "triton_split_k": {"triton"},
    "triton_split_rows": {"triton"},
}
"""Libraries that a family's kernels are made by or call into. A family that is not listed depends on all of them."""


class FamilySource(msgspec.Struct, frozen=True):
    """A family as far as results depend on it.

    Attributes:
        name: As in candidates.
        version: Bumped by its author.
        digest: Of its source files (`source.digest_family`).
    """

    name: str
    version: int
    digest: str


def target_key(target: Target) -> str:
    """Return what times measured on a machine depend on: every field of the target."""
    _code_fields(target)
    return _digest(["target", type(target).__name__, msgspec.to_builtins(target)])


def build_key(source: FamilySource, task: str, candidate: Candidate, target: Target) -> str:
    """Return what the machine code of a candidate depends on; `task` is a task's key."""
    fields = {name: getattr(target, name) for name in _code_fields(target)}
    parts = ["build", source, task, candidate, type(target).__name__, fields]
    return _digest(parts)


def measurement_key(source: FamilySource, task: str, candidate: Candidate, target: Target, policy: str) -> str:
    """Return what the timing of a candidate depends on.

    Args:
        source: Of the candidate's family.
        task: Key of the task.
        candidate: What is timed.
        target: The machine.
        policy: Text of the measuring policy, version included, and of the code that follows it.
    """
    name = type(target).__name__
    known = _SHAPES_CODE[name] | _SHAPES_TIME_ONLY[name]
    used = _LIBRARIES[name] & _USED.get(source.name, _LIBRARIES[name])
    fields = {field: getattr(target, field) for field in sorted(known - _LIBRARIES[name] | used)}
    return _digest(["measurement", source, task, candidate, name, fields, policy])


def race_key(sources: tuple[FamilySource, ...], task: str, target: str, policy: str, effort: Effort) -> str:
    """Return what the outcome of a whole race depends on: all of the above for every family that competes."""
    return _digest(["race", sources, task, target, policy, effort.value])


def kindred_key(sources: tuple[FamilySource, ...], task: str, target: Target, policy: str, effort: Effort) -> str:
    """Return what a race has in common with those on machines that can run the same code: it finds stale outcomes.

    Args:
        sources: As of `race_key`.
        task: As of `race_key`.
        target: Only its first fingerprint counts.
        policy: Name and version of the measuring policy.
        effort: As of `race_key`.
    """
    _code_fields(target)
    name = type(target).__name__
    runs = {field: getattr(target, field) for field in sorted(_MUST_MATCH_TO_RUN[name])}
    return _digest(["kindred", sources, task, name, runs, policy, effort.value])


def confirmation_key(winner: str, baseline: str) -> str:
    """Return what it depends on whether a choice holds: all that the two measurements compared depend on.

    Args:
        winner: Measurement key of the winner.
        baseline: Of the extern.
    """
    return _digest(["confirmation", winner, baseline])


def step_key(target: str, code: str, look: str, sides: tuple[tuple[str, str, tuple[str, ...]], ...]) -> str:
    """Return what the times of a whole program with two sets of kernels depend on.

    Args:
        target: As of `race_key`.
        code: Hash of the code that takes the times.
        look: Which question is asked of the step (`steps.Look`): another one has times of its own.
        sides: Per set the program's fingerprint, its point as text, and the measurement keys of all its kernels.
    """
    return _digest(["step 2", target, code, look, sides])


def _code_fields(target: Target) -> list[str]:
    name = type(target).__name__
    known = _SHAPES_CODE[name] | _SHAPES_TIME_ONLY[name]
    fields = set(type(target).__struct_fields__)
    if fields != known:
        unknown = sorted(fields ^ known)
        msg = f"{name} has fields that no key accounts for: {unknown}; classify them in tune/records/identity.py"
        raise TypeError(msg)
    return sorted(_SHAPES_CODE[name])


def _digest(parts: list[object]) -> str:
    return hashlib.sha256(msgspec.json.encode(parts, order="deterministic")).hexdigest()[:32]
