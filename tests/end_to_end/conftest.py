import pytest
import serving
import small_tune
import torch
from safetensors.torch import save_file
from untuned import untuned

from tune_model.extract.plan import extract
from tune_model.package.contents import ArtifactContents
from tune_model.package.verification.original import build_original
from tune_model.package.write import write_artifact


@pytest.fixture(scope="session")
def little(tmp_path_factory: pytest.TempPathFactory) -> small_tune.Folder:
    """A small network, tuned. Copy it before changing it."""
    return small_tune.tune(small_tune.write_model(tmp_path_factory.mktemp("little")))


@pytest.fixture(scope="session")
def served(tmp_path_factory: pytest.TempPathFactory) -> serving.Served:
    """What the server example serves: a small Llama, plain operators everywhere."""
    folder = tmp_path_factory.mktemp("served")
    found = extract(serving.REQUEST, check=False)
    contents = ArtifactContents("llama", serving.REQUEST, untuned(found.plan), found.constants, "name: llama\n")
    original = build_original(serving.REQUEST, None, torch.device("cpu"))
    save_file({k: v.contiguous() for k, v in original.state_dict().items()}, folder / "model.safetensors")
    return serving.Served(write_artifact(folder / "llama.tuned", contents), folder, original)
