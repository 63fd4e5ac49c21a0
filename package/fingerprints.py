"""Which machine an artifact needs: one fingerprint that must match to run, one that must match to stay optimal.

Pure rules over what a probe found (`system`), so that every decision can be tested without the machine. A decision is a
trace of comparisons, not a bare yes: an error prints all of them.
"""

from collections.abc import Iterator
from typing import Annotated, Final, Literal

import msgspec

from tune_model.tune.target import CpuTarget, Target

__all__ = [
    "LAUNCH_ABI",
    "Comparison",
    "Compatibility",
    "CpuSystem",
    "CpuToRun",
    "CpuToStayOptimal",
    "CudaSystem",
    "CudaToRun",
    "CudaToStayOptimal",
    "System",
    "ToRun",
    "ToStayOptimal",
    "compatibility",
    "to_run",
    "to_stay_optimal",
]

LAUNCH_ABI: Final = 1
"""How launch facts become a kernel's arguments: raised when the meaning of `CudaLaunch` or `CpuLaunch` changes."""


_Number = Annotated[int, msgspec.Meta(ge=1)]
"""Of what must match to run nothing can be unknown; a manifest that says 0 is not one of this program's."""


class CudaToRun(msgspec.Struct, frozen=True, tag="cuda"):
    """What a GPU must be for the cubins to load: they are built for one compute capability."""

    arch: _Number
    launch_abi: _Number


class CpuToRun(msgspec.Struct, frozen=True, tag="cpu"):
    """What a CPU must be for the libraries to run: any that has at least these instruction sets."""

    machine: Annotated[str, msgspec.Meta(min_length=1)]
    isa: tuple[str, ...]
    launch_abi: _Number


ToRun = CudaToRun | CpuToRun


class CudaToStayOptimal(msgspec.Struct, frozen=True, tag="cuda"):
    """What the choices were measured on."""

    name: str
    sm_count: int
    max_clock_mhz: int
    driver_branch: str
    torch: str


class CpuToStayOptimal(msgspec.Struct, frozen=True, tag="cpu"):
    """What the choices were measured on."""

    name: str
    threads: int
    torch: str


ToStayOptimal = CudaToStayOptimal | CpuToStayOptimal


class CudaSystem(msgspec.Struct, frozen=True, tag="cuda"):
    """A GPU as the loading process sees it; `None` is what could not be found out."""

    arch: int
    name: str
    sm_count: int
    torch: str
    max_clock_mhz: int | None = None
    driver_branch: str | None = None


class CpuSystem(msgspec.Struct, frozen=True, tag="cpu"):
    """A CPU as the loading process sees it; `isa` holds all its flags."""

    machine: str
    isa: frozenset[str]
    name: str
    threads: int
    torch: str


System = CudaSystem | CpuSystem


class Comparison(msgspec.Struct, frozen=True):
    """One property compared.

    Attributes:
        to: What it must match for.
        field: Which property.
        expected: The artifact's.
        found: This machine's; `unknown` where it could not be probed.
        matches: An unknown property counts as matching where that costs speed at most.
    """

    to: Literal["run", "stay optimal"]
    field: str
    expected: str
    found: str
    matches: bool


class Compatibility(msgspec.Struct, frozen=True):
    """Whether an artifact may run on a machine, with every comparison that led there."""

    comparisons: tuple[Comparison, ...]

    @property
    def runs(self) -> bool:
        """Everything that must match to run does."""
        return all(c.matches for c in self.comparisons if c.to == "run")

    @property
    def optimal(self) -> bool:
        """Everything that was measured on matches too."""
        return all(c.matches for c in self.comparisons)

    @property
    def mismatches(self) -> tuple[Comparison, ...]:
        """What differs."""
        return tuple(c for c in self.comparisons if not c.matches)


def to_run(target: Target, *, has_code: bool) -> ToRun:
    """Return what a machine must be to run kernels built for a target.

    Args:
        target: What was tuned for.
        has_code: The artifact holds machine code of its own; without any (all winners are ATen calls) an artifact for
            the CPU needs no instruction set beyond torch's.
    """
    if isinstance(target, CpuTarget):
        return CpuToRun(target.machine, tuple(sorted(target.isa)) if has_code else (), LAUNCH_ABI)
    return CudaToRun(target.arch, LAUNCH_ABI)


def to_stay_optimal(target: Target) -> ToStayOptimal:
    """Return what a machine must be for the measured choices to hold."""
    if isinstance(target, CpuTarget):
        return CpuToStayOptimal(target.name, target.threads, target.torch)
    return CudaToStayOptimal(target.name, target.sm_count, target.max_clock_mhz, target.driver_branch, target.torch)


def compatibility(run: ToRun, optimal: ToStayOptimal, system: System) -> Compatibility:
    """Compare an artifact's fingerprints with a machine."""
    return Compatibility(tuple(_compare(run, optimal, system)))


def _compare(run: ToRun, optimal: ToStayOptimal, system: System) -> Iterator[Comparison]:
    yield _equal("run", "launch_abi", run.launch_abi, LAUNCH_ABI)
    match run, optimal, system:
        case CudaToRun(), CudaToStayOptimal(), CudaSystem():
            yield _equal("run", "arch", f"sm_{run.arch}", f"sm_{system.arch}")
            for field in ("name", "sm_count", "max_clock_mhz", "driver_branch", "torch"):
                yield _equal("stay optimal", field, getattr(optimal, field), getattr(system, field))
        case CpuToRun(), CpuToStayOptimal(), CpuSystem():
            yield _equal("run", "machine", run.machine, system.machine)
            missing = sorted(set(run.isa) - system.isa)
            found = f"none of {' '.join(missing)}" if missing else "all of them"
            yield Comparison("run", "isa", " ".join(run.isa) or "anything", found, not missing)
            for field in ("name", "threads", "torch"):
                yield _equal("stay optimal", field, getattr(optimal, field), getattr(system, field))
        case _:
            expected, found = ("cuda" if isinstance(x, CudaToRun | CudaSystem) else "cpu" for x in (run, system))
            yield Comparison("run", "device", expected, found, matches=False)


def _equal(to: Literal["run", "stay optimal"], field: str, expected: object, found: object) -> Comparison:
    # A probe that could not find something out leaves None here and one of these in the target.
    is_unknown = found is None or expected in (0, "", "unknown", "offline")
    matches = found == expected or (to == "stay optimal" and is_unknown)
    return Comparison(to, field, str(expected), "unknown" if found is None else str(found), matches)
