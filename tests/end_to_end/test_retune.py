"""An artifact is tuned again from itself alone: the model is gone."""

import shutil
from pathlib import Path

import pytest
import small_tune
import torch

import tune_model
from tune_model.package.format.records import TaskRecord
from tune_model.package.read import Artifact, open_artifact
from tune_model.pipeline import cli


@pytest.fixture
def alone(little: small_tune.Folder, tmp_path: Path) -> small_tune.Folder:
    """The artifact and its records; model and configuration are deleted."""
    folder = small_tune.copied(little, tmp_path / "alone")
    shutil.rmtree(folder.root / "model")
    folder.config.unlink()
    return folder


def retune(folder: small_tune.Folder, output: str, *options: str) -> int:
    return cli.run(["retune", str(folder.artifact), "-o", str(folder.root / output), "--json", *options])


def tasks(artifact: Artifact) -> list[str]:
    return sorted(r.planned.key for r in artifact.records() if isinstance(r, TaskRecord))


def test_with_its_records_it_reproduces_itself_and_measures_nothing(alone: small_tune.Folder, capsys):
    assert retune(alone, "again.tuned", "--records", str(alone.records)) == 0
    event = small_tune.last_event(capsys)
    assert (event["builds"], event["measured"]) == (0, 0)
    assert (alone.root / "again.tuned").read_bytes() == alone.artifact.read_bytes()


def test_without_records_it_races_everything_again_and_computes_the_same(alone: small_tune.Folder, capsys):
    assert retune(alone, "fresh.tuned", "--records", str(alone.root / "new")) == 0
    event = small_tune.last_event(capsys)
    assert event["builds"]
    assert event["measured"]
    old, new = (open_artifact(alone.root / name) for name in ("little.tuned", "fresh.tuned"))
    assert tasks(new) == tasks(old)
    generator = torch.Generator().manual_seed(3)
    shapes = {"0.weight": (96, 64), "0.bias": (96,), "2.weight": (96,), "2.bias": (96,)}
    weights = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    x = torch.randn(5, 64, generator=generator)
    results = [tune_model.load(artifact.path, weights=weights)(x) for artifact in (old, new)]
    assert torch.allclose(*results, rtol=1e-4, atol=1e-4)


def test_options_go_over_the_stored_configuration(alone: small_tune.Folder):
    assert retune(alone, "more.tuned", "--records", str(alone.records), "--budget", "1h") == 0
    old, new = (open_artifact(alone.root / name) for name in ("little.tuned", "more.tuned"))
    assert "budget: 1h" in new.config()
    assert "budget: null" in old.config()


def test_a_wrong_option_names_the_stored_configuration(alone: small_tune.Folder, capsys):
    assert retune(alone, "x.tuned", "--records", str(alone.records), "--budget", "soon") == 2
    assert "$.search.budget" in capsys.readouterr().err
    assert not (alone.root / "x.tuned").exists()


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_a_machine_that_is_not_here_is_one_line(alone: small_tune.Folder, capsys):
    assert retune(alone, "x.tuned", "--target", "cuda") == 2
    assert len([line for line in capsys.readouterr().err.splitlines() if line.startswith("error")]) == 1
