from pathlib import Path

import pytest
import two_layers
from forge import Files, files_of

from tune_model.package.write import write_artifact


@pytest.fixture(scope="session")
def artifact_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A sound artifact, one file. Copy it before changing it."""
    return write_artifact(tmp_path_factory.mktemp("artifact") / "two_layers.tuned", two_layers.contents())


@pytest.fixture(scope="session")
def files(artifact_file: Path) -> Files:
    """Its files."""
    return files_of(artifact_file)
