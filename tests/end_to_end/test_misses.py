"""From a server's misses to an artifact without them."""

import json
from pathlib import Path

import small_tune
import torch

import tune_model
from tune_model.pipeline import cli


def serve(folder: small_tune.Folder, artifact: Path, misses: Path, *batches: int) -> None:
    """Answer some requests, and write down what ran."""
    generator = torch.Generator().manual_seed(3)
    shapes = {"0.weight": (96, 64), "0.bias": (96,), "2.weight": (96,), "2.bias": (96,)}
    weights = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    tuned = tune_model.load(artifact, weights=weights, device="cpu")
    for batch in batches:
        tuned(torch.randn(batch, 64, generator=generator))
    tuned.coverage().save(misses)


def test_what_a_server_missed_is_tuned_next_time(little: small_tune.Folder, tmp_path: Path, capsys):
    folder = small_tune.copied(little, tmp_path / "little")
    misses = tmp_path / "coverage.json"
    serve(folder, folder.artifact, misses, 1, 8, 64)
    assert json.loads(misses.read_text(encoding="utf-8"))["model"]["name"] == "little"
    assert cli.run(["coverage", str(folder.artifact), "--misses", str(misses), "--strict"]) == 4
    capsys.readouterr()
    more = tmp_path / "more.tuned"
    arguments = ["tune", str(folder.config), "-o", str(more), "--records", str(folder.records), "--json"]
    assert cli.run([*arguments, "--add-misses", str(misses)]) == 0
    assert "added forward.batch = 64, run 1 times by servers" in capsys.readouterr().err
    assert cli.run(["coverage", str(more), "--misses", str(misses), "--strict"]) == 0
    capsys.readouterr()
    assert cli.run([*arguments, "--set", "name=another", "--add-misses", str(misses)]) == 2
    assert f"{misses}: $.model.name is 'little'; expected 'another'" in capsys.readouterr().err
    serve(folder, more, misses, 1, 8, 64)
    assert cli.run(["coverage", str(more), "--misses", str(misses), "--strict"]) == 0
