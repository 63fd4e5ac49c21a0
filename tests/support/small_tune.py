"""A small network in a folder of its own, tuned for real on this machine's CPU in seconds."""

import json
import shutil
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tune_model.pipeline import cli

MODEL = """
from torch import nn


def make():
    return nn.Sequential(nn.Linear(64, 96), nn.GELU(), nn.LayerNorm(96))
"""

CONFIG = """
name: little
model:
  source: torch
  factory: little:make
  path: model
  inputs: [{name: input, shape: [batch, 64], dtype: float32}]
task: forward
dtype: float32
workload: {forward: {batch: [1, 8]}}
target: cpu
search: {effort: quick}
"""


class Folder(NamedTuple):
    """Where everything lies.

    Attributes:
        root: Holds the rest.
        config: The configuration.
        records: Records and kernels.
        artifact: What tuning wrote.
    """

    root: Path

    @property
    def config(self) -> Path:
        return self.root / "little.yaml"

    @property
    def records(self) -> Path:
        return self.root / "store"

    @property
    def artifact(self) -> Path:
        return self.root / "little.tuned"


def write_model(root: Path) -> Folder:
    """Write the model and its configuration."""
    (root / "model").mkdir()
    (root / "model" / "little.py").write_text(MODEL, encoding="utf-8")
    folder = Folder(root)
    folder.config.write_text(CONFIG, encoding="utf-8")
    return folder


def tune(folder: Folder) -> Folder:
    """Tune it."""
    arguments = ["tune", str(folder.config), "-o", str(folder.artifact), "--records", str(folder.records), "--json"]
    assert cli.run(arguments) == 0
    return folder


def copied(folder: Folder, root: Path) -> Folder:
    """Copy everything, to be changed."""
    shutil.copytree(folder.root, root)
    return Folder(root)


def last_event(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    """Return the last event that `--json` printed."""
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("{")]
    event: dict[str, Any] = json.loads(lines[-1])
    assert event["type"] == "tune finished"
    return event
