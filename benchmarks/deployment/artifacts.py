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

__all__ = ["Deployment", "TuningFailedError", "deploy", "straighten", "tuned_artifact"]

_MAIN: Final = "import sys; from tune_model.pipeline.cli import main; main(sys.argv[1:])"
_PARTIAL: Final = 3
_LEAST_S: Final = 90.0
_AROUND_S: Final = 30.0
"""Of a tune's time, for tracing before it and the artifact after it."""

_OVERDRAWN: Final = 1.2
"""A budget of one second may take so many."""


class TuningFailedError(TuneModelError):
    """The command that tunes ended with an error."""


class Deployment(NamedTuple):
    """A model before and after.

    Attributes:
        path: Of the artifact.
        original: As its user has it; its parameters are views of the tuned model's weights where those are laid out as
            its own are, so that both fit.
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
        budget = ["--budget", f"{int((left - _AROUND_S) / _OVERDRAWN)}s"]
    unfinished = path.with_suffix(".unfinished.tuned")
    options = ["--effort", bench.shop.effort.value, "--records", str(folder / "records"), *budget]
    bench.tell(f"  tuning {model.name}")
    command = [sys.executable, "-c", _MAIN, "tune", str(config), *options, "-o", str(unfinished), "--json"]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    last = _last_event(done.stdout)
    if done.returncode not in {0, _PARTIAL}:
        raise TuningFailedError(f"tuning {model.name} ended with exit code {done.returncode}")
    if last.get("stopped"):
        raise TimeOverError
    unfinished.replace(path)
    record = {k: last[k] for k in ("seconds", "builds", "measured") if k in last}
    bench.ledger.record("tuning", model.name, record)
    return path


def _last_event(text: str) -> dict[str, Any]:
    events = [line for line in text.splitlines() if line.startswith("{")]
    return dict(json.loads(events[-1])) if events else {}


def deploy(path: Path, device: torch.device) -> Deployment:
    """Build the original with random weights and load the artifact over the same memory, as far as that is fair.

    A weight that the artifact turns in memory would be turned for the original as well, which its user's is not.
    """
    artifact = open_artifact(path)
    original = build_original(artifact.manifest.request, None, device)
    with torch.no_grad():
        tuned = start(artifact, original, device, share=True)
        if straighten(original):
            tuned.reload_weights()  # of equal values: notes that these weights are copies now
    return Deployment(path, original, tuned)


def straighten(model: nn.Module) -> int:
    """Give parameters that lie turned in memory a copy of their own, row by row; returns how many there were."""
    turned = [parameter for parameter in model.parameters() if not parameter.is_contiguous()]
    for parameter in turned:
        parameter.data = parameter.data.contiguous()
    return len(turned)
