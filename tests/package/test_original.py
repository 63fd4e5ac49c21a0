"""The model to compare with, built again: from a transformers folder, a factory or a saved program."""

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from transformers import BertConfig, BertModel
from transformers.utils import logging
from untuned import untuned

from tune_model.extract.plan import extract
from tune_model.extract.request import ExportedSource, ModelInput, ModelSource, Phase, Request, TransformersSource
from tune_model.extract.tracing.exported import ExportedModule
from tune_model.package.contents import ArtifactContents
from tune_model.package.verification.original import OriginalError, build_original
from tune_model.package.verify import verify
from tune_model.package.write import write_artifact

BERT = BertConfig(
    hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32, vocab_size=64,
    max_position_embeddings=32,
)  # fmt: skip


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, torch.nn.Module]:
    folder = tmp_path_factory.mktemp("bert")
    torch.manual_seed(0)
    model = BertModel(BERT).eval()
    model.save_pretrained(folder)
    return folder, model


def request(source: ModelSource) -> Request:
    return Request(source, "float32", "encoder", (Phase("forward", {"batch": (1,), "sequence": (4,)}),))


@pytest.mark.parametrize("given", [False, True])
def test_a_model_that_takes_no_other_attention_is_built_with_its_own(given):
    """MPNet was refused: it keeps its own attention, which the tracer knew and this did not."""
    small = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    source = TransformersSource(config={"model_type": "mpnet", "vocab_size": 64, **small})
    first = build_original(request(source), None, torch.device("cpu"))
    model = build_original(request(source), first.state_dict(), torch.device("cpu")) if given else first
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), first.parameters(), strict=True))
    assert model.config._attn_implementation == "eager"


def test_weights_without_elements_stay_without():
    """DINOv3 has a weight for its register tokens even when it has none."""
    small = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    source = TransformersSource(config={"model_type": "dinov3_vit", "image_size": 32, **small})
    model = build_original(request(source), None, torch.device("cpu"))
    assert sum(p.numel() == 0 for p in model.parameters()) == 1


@pytest.mark.parametrize("kind", ["folder", "file", "tensors"])
def test_a_model_is_built_with_its_weights_and_in_silence(saved, capfd, kind):
    """transformers used to draw `Loading weights: 100%` bars into logs."""
    folder, model = saved
    weights = {"folder": folder, "file": folder / "model.safetensors", "tensors": model.state_dict()}[kind]
    drawn = logging.is_progress_bar_enabled()
    capfd.readouterr()
    built = build_original(request(TransformersSource(folder=str(folder))), weights, torch.device("cpu"))
    assert capfd.readouterr() == ("", "")
    assert logging.is_progress_bar_enabled() == drawn, "the setting is its user's"
    ids = torch.arange(4)[None]
    with torch.no_grad():
        assert torch.equal(built(ids).last_hidden_state, model(ids).last_hidden_state)


class Nested(nn.Module):
    """Takes a constant, and tensors by keyword inside a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 8))
        self.register_buffer("shift", torch.full((8,), 0.5))

    def forward(self, x: Tensor, mask: Tensor | None = None, *, pair: dict[str, Tensor]) -> dict[str, Tensor]:
        assert mask is None
        return {"sum": torch.relu(self.layers(x)) + pair["a"] + self.shift, "other": pair["b"] * 2}


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, nn.Module]:
    torch.manual_seed(0)
    model = Nested().eval()
    pair = {"a": torch.randn(4, 8), "b": torch.randn(3)}
    path = tmp_path_factory.mktemp("exported") / "nested.pt2"
    torch.export.save(torch.export.export(model, (torch.randn(4, 8), None), {"pair": pair}), path)
    return path, model


def test_a_saved_program_keeps_names_and_takes_tensors_in_order(exported):
    path, model = exported
    module = ExportedModule(torch.export.load(path))
    assert module.state_dict().keys() == model.state_dict().keys()
    x, a, b = torch.randn(4, 8), torch.randn(4, 8), torch.randn(3)
    expected = model(x, pair={"a": a, "b": b})
    seen = module(x, a, b)
    assert seen.keys() == expected.keys()
    assert all(torch.equal(seen[name], expected[name]) for name in seen)
    module.load_state_dict({name: torch.zeros_like(tensor) for name, tensor in model.state_dict().items()})
    assert torch.equal(module(x, a, b)["sum"], a)


def test_an_artifact_of_a_saved_program_verifies(tmp_path: Path, exported):
    """Calling the saved program by its inputs' names used to end in a traceback."""
    path, model = exported
    inputs = tuple(ModelInput(name, shape, "float32") for name, shape in (("x", (4, 8)), ("a", (4, 8)), ("b", (3,))))
    asked = Request(ExportedSource(str(path)), "float32", "forward", (Phase("forward", {}),), inputs=inputs)
    extraction = extract(asked)
    contents = ArtifactContents("nested", asked, untuned(extraction.plan), extraction.constants, "name: nested\n")
    artifact = write_artifact(tmp_path / "nested.tuned", contents)
    for weights in (None, {name: tensor + 1 for name, tensor in model.state_dict().items()}):
        report = verify(artifact, request=lambda _: asked, weights=weights)
        assert report.passed, report.checks
        assert sum(check.name.startswith("forward") for check in report.checks) == 2


def test_a_saved_program_that_is_not_here(tmp_path: Path):
    with pytest.raises(OriginalError, match=r"gone.pt2 is not here; run where the configuration's model.path leads to"):
        build_original(request(ExportedSource(str(tmp_path / "gone.pt2"))), None, torch.device("cpu"))
