"""Models that compute with complex numbers, from tuning to serving."""

import importlib.util
from pathlib import Path

import pytest
import torch

import tune_model
from tune_model.pipeline import cli

SUPPORT = Path(__file__).parents[1] / "support"

CONFIG = """
name: {name}
model:
  source: torch
  factory: small_models:make_{name}
  path: {support}
  inputs: [{{name: x, shape: {shape}}}]
task: forward
dtype: float32
workload: {{forward: {{batch: [1, 4]}}}}
target: cpu
search: {{effort: quick}}
"""


@pytest.mark.parametrize(("name", "shape"), [("rotated", (9, 24)), ("complex", (8,))])
def test_what_is_served_is_what_the_model_gives(
    name: str, shape: tuple[int, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    config, artifact = tmp_path / f"{name}.yaml", tmp_path / f"{name}.tuned"
    listed = f"[batch, {', '.join(map(str, shape))}]"
    config.write_text(CONFIG.format(name=name, support=SUPPORT, shape=listed), encoding="utf-8")
    assert cli.run(["tune", str(config), "-o", str(artifact), "--records", str(tmp_path / "store"), "--json"]) == 0
    capsys.readouterr()
    assert cli.run(["verify", str(artifact)]) == 0, capsys.readouterr().out
    spec = importlib.util.spec_from_file_location("small_models", SUPPORT / "small_models.py")
    assert spec is not None
    assert spec.loader is not None
    models = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(models)
    original = getattr(models, f"make_{name}")().eval()
    tuned = tune_model.load(artifact, weights=original)
    for batch in (1, 3, 4):
        x = torch.randn(batch, *shape)
        with torch.no_grad():
            expected = original(x)
        found = tuned(x)
        if isinstance(expected, torch.Tensor):
            expected, found = {"output": expected}, {"output": found}
        assert found.keys() == expected.keys()
        for output, wanted in expected.items():
            assert found[output].dtype == wanted.dtype
            assert (found[output] - wanted).norm() <= 1e-6 * wanted.norm()
