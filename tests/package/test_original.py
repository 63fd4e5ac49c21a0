"""The model to compare with, built again from its folder or from tensors alone."""

from pathlib import Path

import pytest
import torch
from transformers import BertConfig, BertModel
from transformers.utils import logging

from tune_model.extract.request import Phase, Request, TransformersSource
from tune_model.package.verification.original import build_original

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


def request(source: TransformersSource) -> Request:
    return Request(source, "float32", "encoder", (Phase("forward", {"batch": (1,), "sequence": (4,)}),))


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
