"""Verification of an artifact on this machine, step by step: files, machine, operators, kernels, whole program.

Verifying runs the artifact's machine code, as loading does. A step that cannot be done stops those that need it; what
was found out until then is in the report.
"""

import os
import warnings
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import msgspec

from tune_model.package.fingerprints import CudaToRun, compatibility
from tune_model.package.format.wire import ArtifactError
from tune_model.package.load import check_operators, start
from tune_model.package.parts import OtherMachineError, part_for_device
from tune_model.package.read import Artifact, open_artifact
from tune_model.package.signature import SignatureError, VerifyKey
from tune_model.package.system import choose_device, probe_system
from tune_model.package.verification.check import Check, Outcome
from tune_model.runtime.errors import TuneModelError

if TYPE_CHECKING:
    import torch

    from tune_model.extract.request import Request
    from tune_model.runtime.weights.checkpoint import WeightSource

__all__ = ["Check", "VerifyReport", "verify"]


class VerifyReport(msgspec.Struct, frozen=True):
    """What was looked at, in order."""

    checks: tuple[Check, ...]

    @property
    def passed(self) -> bool:
        """Nothing failed."""
        return all(check.outcome != "failed" for check in self.checks)


def verify(
    path: str | os.PathLike[str],
    *,
    request: "Callable[[Artifact], Request] | None" = None,
    weights: "WeightSource | None" = None,
    device: "str | torch.device | None" = None,
    report: Callable[[Check], None] | None = None,
    verify_key: VerifyKey | None = None,
) -> VerifyReport:
    """Verify an artifact.

    Args:
        path: A folder or a file; of a bundle, the part for the device.
        request: Says where the original model is; by default it is built from the configuration that the artifact's
            manifest holds, which has no folder and so no weights.
        weights: What to compare with; by default those inside the artifact, then those in the request's folder, then
            seeded random ones.
        device: Where; by default the first device of the kind it was tuned for.
        report: Called with each check as it is made.
        verify_key: Who must have signed it.

    Returns:
        All checks. A damaged artifact, a missing signature or another machine is a failed check, not an error.

    Raises:
        OSError: The artifact does not exist or cannot be read.
        DeviceError: There is no such device.
    """
    checks: list[Check] = []
    for check in _checks(path, request, weights, device, verify_key):
        checks.append(check)
        if report is not None:
            report(check)
    return VerifyReport(tuple(checks))


def _checks(
    path: str | os.PathLike[str],
    request: "Callable[[Artifact], Request] | None",
    weights: "WeightSource | None",
    device: "str | torch.device | None",
    verify_key: VerifyKey | None,
) -> Iterator[Check]:
    try:
        artifact = open_artifact(path, part_for_device(device), verify_key)
    except SignatureError as error:
        yield Check("signature", "failed", str(error), f"a signature by {verify_key.text if verify_key else 'nobody'}")
        return
    except ArtifactError as error:
        yield Check(f"files: {error.file}: {error.field}", "failed", error.found, error.expected)
        return
    except OtherMachineError as error:
        yield Check("to run: part", "failed", str(error), "a part for this machine")
        return
    if verify_key is not None:
        yield Check("signature", "passed", f"by {verify_key.text}", f"a signature by {verify_key.text}")
    yield Check("files", "passed", f"{len(artifact.files)} files as the manifest says", "sizes and SHA-256 as listed")
    wanted = "cuda" if isinstance(artifact.manifest.must_match_to_run, CudaToRun) else "cpu"
    chosen = choose_device(device, wanted)
    machine = list(_check_machine(artifact, chosen))
    yield from machine
    if any(check.outcome == "failed" for check in machine):
        return
    try:
        check_operators(artifact)
    except TuneModelError as error:
        yield Check("operators", "failed", str(error), "operators on the runtime's list")
        return
    yield Check("operators", "passed", "all on the runtime's list", "operators on the runtime's list")
    from tune_model.package.verification.kernels import check_kernels

    yield from check_kernels(artifact, chosen)
    asked = artifact.manifest.request if request is None else request(artifact)
    yield from _check_program(artifact, asked, weights, chosen)


def _check_machine(artifact: Artifact, device: "torch.device") -> Iterator[Check]:
    manifest = artifact.manifest
    decision = compatibility(manifest.must_match_to_run, manifest.must_match_to_stay_optimal, probe_system(device))
    for comparison in decision.comparisons:
        wrong: Outcome = "failed" if comparison.to == "run" else "noted"
        outcome: Outcome = "passed" if comparison.matches else wrong
        yield Check(f"to {comparison.to}: {comparison.field}", outcome, comparison.found, comparison.expected)


def _check_program(
    artifact: Artifact, request: "Request", weights: "WeightSource | None", device: "torch.device"
) -> Iterator[Check]:
    from tune_model.extract.tracing.front_end import SourceError
    from tune_model.package.verification.model import check_model
    from tune_model.package.verification.original import OriginalError, build_original, weights_at_hand

    expected = "a program that computes what the model computes"
    source = weights_at_hand(artifact, request) if weights is None else weights
    try:
        original = build_original(request, source, device)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what differs between the machines is in the report already
            tuned = start(artifact, original if source is None else source, device)
        yield from check_model(tuned, original, request)
    except (OriginalError, SourceError) as error:
        yield Check("program", "skipped", f"no original model here: {error}", expected)
    except (TuneModelError, RuntimeError) as error:
        yield Check("program", "failed", f"{type(error).__name__}: {error}", expected)
