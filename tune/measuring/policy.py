"""How times are taken, by name and version: part of every record's key, so a changed protocol invalidates old times.

Numbers of the protocol live here; the clocks that follow it are `cuda_stopwatch` and `cpu_stopwatch`.
"""

import math
from typing import Final

import msgspec

from tune_model.tune.target import CpuTarget, CudaTarget, Target

__all__ = ["Policy", "Rung", "policy_for"]

_COLD_FACTOR: Final = 3
"""Rotating over three times the last-level cache leaves nothing of a weight in it by the time it comes round again."""


class Rung(msgspec.Struct, frozen=True):
    """How much time one step of a race spends on a candidate.

    Attributes:
        sample_us: Length of one sample; as many calls as fit are averaged in it.
        samples: How many are taken.
        least: So many must do when a sample takes long, or when others use the machine.
        most_us: After this long, `least` are enough.
    """

    sample_us: float
    samples: int
    least: int = 3
    most_us: float = math.inf


class Policy(msgspec.Struct, frozen=True):
    """One measuring protocol.

    Attributes:
        name: `cuda-graph` or `cpu-rounds`.
        version: Raised when the protocol changes so that old times no longer compare.
        rotate_bytes: Weights (and caches) rotate over distinct copies of this size in all.
        rungs: Of a race, cheapest first; the last is repeated if a race needs more.
        final: Rounds of the interleaved comparison, and the length of each sample in it.
    """

    name: str
    version: int
    rotate_bytes: int
    rungs: tuple[Rung, ...]
    final: Rung

    @property
    def family(self) -> str:
        """Name and version, whatever the sizes of caches and models."""
        return f"{self.name}/{self.version}"

    @property
    def key(self) -> str:
        """The text that records are keyed by: all of the above."""
        steps = " ".join(_text(rung) for rung in (*self.rungs, self.final))
        return f"{self.family} rotate={self.rotate_bytes} {steps}"


def _text(rung: Rung) -> str:
    return f"{rung.samples}x{rung.sample_us:g}us>={rung.least}<{rung.most_us:g}us"


def policy_for(target: Target, program_bytes: int) -> Policy:
    """Return the protocol for a target and a model.

    A model larger than the last-level cache finds each weight cold, so copies rotate over three times that cache. A
    smaller one finds it where the rest of the model leaves it: copies rotate over the model's size, rounded up to a
    power of two so that similar models share records.

    Args:
        target: The machine.
        program_bytes: Weights that one step of the program reads, in all.
    """
    cache = target.l2_bytes if isinstance(target, CudaTarget) else target.l3_bytes or target.l2_bytes * target.threads
    fits = program_bytes <= cache
    rotate = 1 << max(program_bytes - 1, 0).bit_length() if fits else _COLD_FACTOR * cache
    if isinstance(target, CpuTarget):
        rungs = (Rung(500.0, 5, 3, 3e4), Rung(1000.0, 8, 3, 6e4))
        return Policy("cpu-rounds", 2, rotate, rungs, Rung(1000.0, 21, 9, 5e5))
    return Policy("cuda-graph", 1, rotate, (Rung(1000.0, 3), Rung(1000.0, 8)), Rung(1000.0, 31))
