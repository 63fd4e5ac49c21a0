"""Which part of a bundle a machine takes: pure rules over what was probed, so any machine's choice can be tested.

A part that cannot run is never taken. Of those that can, one that was tuned on just such a machine is; else the one
that differs least from it; of equal ones the first, as the bundle lists them.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from tune_model.package.fingerprints import Comparison, Compatibility, CudaToRun, System, compatibility
from tune_model.package.format.manifest import Manifest
from tune_model.package.read import Artifact, ChoosePart
from tune_model.package.system import choose_device, probe_system
from tune_model.runtime.errors import TuneModelError

if TYPE_CHECKING:
    import torch

__all__ = [
    "OtherMachineError",
    "PartChoice",
    "PartNameError",
    "choose_part",
    "named_part",
    "native_part",
    "part_for_device",
    "part_name",
]


class OtherMachineError(TuneModelError):
    """The artifact's kernels cannot run on this machine.

    Attributes:
        comparisons: Everything that was compared, matching or not.
    """

    def __init__(self, message: str, comparisons: tuple[Comparison, ...]) -> None:
        self.comparisons = comparisons
        super().__init__(message)


class PartNameError(TuneModelError):
    """A name fits no part of a bundle, or several."""


class PartChoice(NamedTuple):
    """What the rules say.

    Attributes:
        part: Its number; `None` when none can run.
        decisions: Per part, its comparison with the system that suits it best.
    """

    part: int | None
    decisions: tuple[Compatibility, ...]


def choose_part(parts: Sequence[Manifest], systems: Sequence[System]) -> PartChoice:
    """Choose a part for a machine.

    Args:
        parts: Manifests, in the bundle's order.
        systems: The machine's devices, the preferred first: a part for an earlier one goes before any for a later.
    """
    decisions = [[_compare(part, system) for system in systems] for part in parts]
    best = tuple(min(found, key=lambda decision: (not decision.runs, len(decision.mismatches))) for found in decisions)
    for number in range(len(systems)):
        running = [index for index, found in enumerate(decisions) if found[number].runs]
        if running:
            return PartChoice(min(running, key=lambda index: len(decisions[index][number].mismatches)), best)
    return PartChoice(None, best)


def native_part(parts: tuple[Artifact, ...]) -> Artifact:
    """Return the part for this machine: for its GPU if there is one, else for its CPU.

    Raises:
        OtherMachineError: No part runs here.
    """
    import torch

    devices = ["cuda", "cpu"] if torch.cuda.is_available() else ["cpu"]
    return _part_for(parts, [probe_system(device) for device in devices])


def part_for_device(device: "str | torch.device | None") -> ChoosePart:
    """Return what takes the part for a device of this machine; `None` is the machine's preferred one.

    The chooser raises `OtherMachineError` when no part runs there, and `DeviceError` when there is no such device.
    """

    def choose(parts: tuple[Artifact, ...]) -> Artifact:
        if len(parts) == 1:  # the loader says what is wrong with an artifact's only machine
            return parts[0]
        return native_part(parts) if device is None else _part_for(parts, [probe_system(choose_device(device, "cpu"))])

    return choose


def named_part(name: str) -> ChoosePart:
    """Return what takes a part by name: its device (`cpu`, `cuda`, `sm_90`), part of its machine's name or digest.

    The chooser raises `PartNameError` when no part is meant, or several are.
    """

    def choose(parts: tuple[Artifact, ...]) -> Artifact:
        found = [part for part in parts if _is_meant(part.manifest, name.strip().lower())]
        if len(found) == 1:
            return found[0]
        listed = "; ".join(part_name(part.manifest) for part in (found or parts))
        problem = f"{len(found)} parts are meant" if found else "no part is"
        raise PartNameError(f"{parts[0].path}: --part is {name!r}, by which {problem}; expected one of: {listed}")

    return choose


def part_name(manifest: Manifest) -> str:
    """Return a part's name for people: `sm_90 NVIDIA H200 (3f2a9c81d04b)`."""
    return f"{_device(manifest)} {manifest.target.name} ({manifest.digest[:12]})"


def _is_meant(manifest: Manifest, name: str) -> bool:
    run = manifest.must_match_to_run
    kinds = {_device(manifest), "cuda" if isinstance(run, CudaToRun) else "cpu"}
    by_digest = len(name) >= 6 and manifest.digest.startswith(name)
    return name in kinds or by_digest or (bool(name) and name in manifest.target.name.lower())


def _device(manifest: Manifest) -> str:
    run = manifest.must_match_to_run
    return f"sm_{run.arch}" if isinstance(run, CudaToRun) else "cpu"


def _compare(part: Manifest, system: System) -> Compatibility:
    return compatibility(part.must_match_to_run, part.must_match_to_stay_optimal, system)


def _part_for(parts: tuple[Artifact, ...], systems: Sequence[System]) -> Artifact:
    choice = choose_part([part.manifest for part in parts], systems)
    if choice.part is not None:
        return parts[choice.part]
    problems = "; ".join(
        f"{part_name(part.manifest)}: "
        + ", ".join(f"{c.field} is {c.found}, expected {c.expected}" for c in decision.mismatches if c.to == "run")
        for part, decision in zip(parts, choice.decisions, strict=True)
    )
    comparisons = tuple(c for decision in choice.decisions for c in decision.comparisons)
    raise OtherMachineError(
        f"{parts[0].path}: none of its {len(parts)} parts runs here: {problems}; tune here and merge the result",
        comparisons,
    )
