"""Artifacts to measure: tuned on the command line, once, in the benchmark's folder."""

import hashlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch
import yaml
from bench.run import Bench, TimeOverError
from torch import nn

from deployment.models import Model
from tune_model.package.load import start
from tune_model.package.read import open_artifact
from tune_model.package.verification.original import build_original
from tune_model.runtime.errors import TuneModelError
from tune_model.runtime.tuned import TunedModel

__all__ = ["Deployment", "TuningFailedError", "deploy", "tuned_artifact"]

_MAIN: Final = "import sys; from tune_model.pipeline.cli import main; main(sys.argv[1:])"
_PARTIAL: Final = 3
_LEAST_S: Final = 60.0


class TuningFailedError(TuneModelError):
    """The command that tunes ended with an error."""


class Deployment(NamedTuple):
    """A model before and after.

    Attributes:
        path: Of the artifact.
        original: As its user has it; its parameters are views of the tuned model's weights, so both fit.
        tuned: As a server has it.
    """

    path: Path
    original: nn.Module
    tuned: TunedModel


def tuned_artifact(bench: Bench, model: Model) -> Path:
    """Return a model's artifact, tuning what is not in the records.

    Raises:
        TimeOverError: The time did not suffice; what was measured is in the records.
        TuningFailedError: Tuning ended with an error.
    """
    folder = bench.shop.folder
    folder.mkdir(parents=True, exist_ok=True)
    text = yaml.safe_dump(dict(model.config), sort_keys=False)
    identity = hashlib.sha256(f"{text}{bench.shop.effort.value}".encode()).hexdigest()[:12]
    path = folder / f"{model.name}-{identity}.tuned"
    if path.exists():
        return path
    config = folder / f"{model.name}.yaml"
    config.write_text(text, encoding="utf-8")
    budget: list[str] = []
    left = bench.clock.left_s
    if left is not None:
        if left < _LEAST_S:
            raise TimeOverError
        budget = ["--budget", f"{int(left - _LEAST_S / 2)}s"]
    unfinished = path.with_suffix(".unfinished.tuned")
    options = ["--effort", bench.shop.effort.value, "--records", str(folder / "records"), *budget]
    bench.tell(f"  tuning {model.name}")
    command = [sys.executable, "-c", _MAIN, "tune", str(config), *options, "-o", str(unfinished), "--json"]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    last = _last_event(done.stdout)
    if done.returncode not in {0, _PARTIAL}:
        raise TuningFailedError(f"tuning {model.name} ended with exit code {done.returncode}")
    if done.returncode == _PARTIAL and bench.clock.left_s is not None and bench.clock.left_s < _LEAST_S:
        raise TimeOverError
    unfinished.replace(path)
    record = {k: last[k] for k in ("seconds", "builds", "measured") if k in last}
    bench.ledger.record("tuning", model.name, record)
    return path


def _last_event(text: str) -> dict[str, Any]:
    events = [line for line in text.splitlines() if line.startswith("{")]
    return dict(json.loads(events[-1])) if events else {}


def deploy(path: Path, device: torch.device) -> Deployment:
    """Build the original with random weights and load the artifact over the same memory."""
    artifact = open_artifact(path)
    original = build_original(artifact.manifest.request, None, device)
    with torch.no_grad():
        tuned = start(artifact, original, device, share=True)
    return Deployment(path, original, tuned)
