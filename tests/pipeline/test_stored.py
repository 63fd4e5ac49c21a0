from pathlib import Path

import pytest
import two_layers

from tune_model.extract.request import FactorySource, TransformersSource
from tune_model.package.read import open_artifact
from tune_model.package.write import write_artifact
from tune_model.pipeline.config import dump_config, load_config
from tune_model.pipeline.stored import stored_request

CONFIG = """
name: bert
model: {source: transformers, path: bert}
task: encoder
workload: {forward: {batch: [1], sequence: [8]}}
"""


@pytest.fixture
def artifact(tmp_path: Path):
    (tmp_path / "bert").mkdir()
    (tmp_path / "bert" / "config.json").write_text('{"model_type": "bert"}')
    (tmp_path / "bert.yaml").write_text(CONFIG)
    text = dump_config(load_config(str(tmp_path / "bert.yaml")).config)
    return open_artifact(write_artifact(tmp_path / "a.tuned", two_layers.contents(config_yaml=text)))


def test_the_model_is_where_the_configuration_says(tmp_path: Path, artifact):
    request = stored_request(artifact, tmp_path)
    assert request.source == TransformersSource(folder=str(tmp_path / "bert"))
    assert request.task == "encoder"


def test_a_model_that_is_not_here_leaves_the_manifests_request(tmp_path: Path, artifact):
    (tmp_path / "elsewhere").mkdir()
    request = stored_request(artifact, tmp_path / "elsewhere")
    assert request == artifact.manifest.request
    assert request.source == FactorySource("two_layers:model")


def test_a_configuration_of_another_version_leaves_the_manifests_request(tmp_path: Path):
    path = write_artifact(tmp_path / "a.tuned", two_layers.contents(config_yaml="future: field\n"))
    artifact = open_artifact(path)
    assert stored_request(artifact, tmp_path) == artifact.manifest.request
