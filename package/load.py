"""From an artifact to a model that runs: open it, compare machines, bind weights, load kernels.

Imports no compiler, tracer or model library. Running a model runs the artifact's machine code: whoever loads one trusts
its maker (docs/security.md).
"""

import os
import stat
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from tune_model.package.fingerprints import Comparison, Compatibility, CudaToRun, compatibility
from tune_model.package.format.members import FOLDERS
from tune_model.package.identity import identify
from tune_model.package.parts import OtherMachineError, part_for_device
from tune_model.package.read import Artifact, open_artifact
from tune_model.package.signature import read_verify_key
from tune_model.package.system import choose_device, probe_system
from tune_model.runtime.errors import TuneModelError
from tune_model.runtime.program import Call, Program

if TYPE_CHECKING:
    import torch

    from tune_model.runtime.tuned import TunedModel
    from tune_model.runtime.weights.checkpoint import WeightSource

__all__ = [
    "OtherMachineError",
    "TunedForOtherMachineWarning",
    "WeightsNeededError",
    "WritableByAllWarning",
    "check_machine",
    "check_operators",
    "load",
    "start",
]


class WeightsNeededError(TuneModelError):
    """The artifact holds no weights and the caller gave none."""


class TunedForOtherMachineWarning(UserWarning):
    """The artifact runs here, but its choices were measured on something else; tune again to be sure of the speed."""


class WritableByAllWarning(UserWarning):
    """Any user of this machine can change the artifact, and so the code that loading it runs."""


def load(
    path: str | os.PathLike[str],
    weights: "WeightSource | None" = None,
    device: "str | torch.device | None" = None,
    *,
    strict: bool = False,
    graphs: bool = True,
    verify_key: str | os.PathLike[str] | None = None,
) -> "TunedModel":
    """Load a tuned model.

    Args:
        path: An artifact, a folder or a file; of a bundle, the part for the device.
        weights: A module, a state dict, or a safetensors file or a folder of them, by the names of the checkpoint the
            model was tuned for; not needed when the artifact has them inside.
        device: Where to run; by default the first device of the kind it was tuned for.
        strict: Raise `NotTunedError` for a shape nothing legal is tuned for, instead of running torch's operators.
        graphs: Replay decode steps and repeated shapes as CUDA graphs.
        verify_key: A file with the public key of whom you trust; what is not signed by it, or was changed afterwards,
            is refused before anything of it is used.

    Returns:
        A model to call, or to `generate` with.

    Raises:
        SignatureError: The artifact is not signed by the key.
        SigningKeyError: The key cannot be read.
        ArtifactError: The artifact is damaged, foreign or of another version.
        OtherMachineError: Its kernels cannot run here.
        DeviceError: There is no such device.
        WeightsNeededError: It holds no weights and none were given.
        WeightError: The weights given do not fit.
    """
    key = None if verify_key is None else read_verify_key(verify_key)
    artifact = open_artifact(path, part_for_device(device), key)
    return start(artifact, weights, device, strict=strict, graphs=graphs)


def start(
    artifact: Artifact,
    weights: "WeightSource | None" = None,
    device: "str | torch.device | None" = None,
    *,
    strict: bool = False,
    graphs: bool = True,
    share: bool = False,
) -> "TunedModel":
    """Make a model of an artifact that is open; arguments, result and errors as `load`'s.

    With `share`, the module that weights come from gets views of them for parameters.
    """
    from tune_model.runtime.tuned import ModelParts, TunedModel

    wanted = "cuda" if isinstance(artifact.manifest.must_match_to_run, CudaToRun) else "cpu"
    chosen = choose_device(device, wanted)
    check_machine(artifact, chosen)
    check_operators(artifact)
    source = artifact.weights() if weights is None else weights
    if source is None:
        raise WeightsNeededError(
            f"{artifact.path}: holds no weights; pass weights= with a module, a state dict or a folder of safetensors "
            f"(or tune with output.weights: embed)"
        )
    grids = {phase.name: phase.grid for phase in artifact.manifest.request.phases}
    programs = tuple(artifact.programs.values())
    model = identify(artifact.manifest.name, artifact.manifest.request)
    parts = ModelParts(programs, artifact.constants(), artifact.replay, artifact.code, grids, model)
    return TunedModel(parts, source, chosen, strict=strict, graphs=graphs, share=share)


def check_machine(artifact: Artifact, device: "torch.device") -> Compatibility:
    """Compare the artifact's fingerprints with a device; warn where it runs but was tuned for something else.

    Raises:
        OtherMachineError: It cannot run there.
    """
    manifest = artifact.manifest
    decision = compatibility(manifest.must_match_to_run, manifest.must_match_to_stay_optimal, probe_system(device))
    if not decision.runs:
        problems = _listed(c for c in decision.mismatches if c.to == "run")
        message = f"{artifact.path}: was tuned for another machine: {problems}; load it there, or tune again here"
        raise OtherMachineError(message, decision.comparisons)
    if not decision.optimal:
        message = f"{artifact.path}: was tuned on another machine: {_listed(decision.mismatches)}; tune again for speed"
        warnings.warn(message, TunedForOtherMachineWarning, stacklevel=4)
    open_to_all = _writable_by_all(artifact)
    if open_to_all is not None:
        message = f"{open_to_all}: can be changed by every user of this machine, and holds code; chmod o-w it"
        warnings.warn(message, WritableByAllWarning, stacklevel=4)
    return decision


def _writable_by_all(artifact: Artifact) -> Path | None:
    """Return what any user may change, if anything: the file, or of a folder any part; or replace, in its folder."""
    place = artifact.path
    found = [place]
    if place.is_dir():
        found += place.iterdir()
        found += (path for name in sorted(FOLDERS) for path in (place / name).glob("*"))
    for path in found:
        if path.stat().st_mode & stat.S_IWOTH:
            return path
    folder = place.absolute().parent
    mode = folder.stat().st_mode
    return folder if mode & stat.S_IWOTH and not mode & stat.S_ISVTX else None


def _listed(comparisons: Iterable[Comparison]) -> str:
    return ", ".join(f"{c.field} is {c.found}, expected {c.expected}" for c in comparisons)


def check_operators(artifact: Artifact) -> None:
    """Resolve every operator that the artifact could ever call, so that none is refused halfway through a request.

    Raises:
        OperatorError: One is not on the runtime's list, or not in this torch.
    """
    from tune_model.runtime.operators.allowed import resolve

    names = {call.op for program in artifact.programs.values() for call in _calls(program)}
    for entries in artifact.replay.forms.values():
        names |= {step.op for entry in entries for step in entry.kernel.steps if isinstance(step, Call)}
    for name in sorted(names):
        resolve(name)


def _calls(program: Program) -> Iterable[Call]:
    yield from (step for step in program.steps if isinstance(step, Call))
    for form in program.forms.values():
        yield from form.body
