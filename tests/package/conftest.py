from pathlib import Path

import handmade
import pytest
from forge import Files, files_of

from tune_model.package.write import write_artifact


@pytest.fixture(scope="session")
def artifact_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A sound artifact, one file. Copy it before changing it."""
    return write_artifact(tmp_path_factory.mktemp("artifact") / "handmade.tuned", handmade.contents())


@pytest.fixture(scope="session")
def files(artifact_file: Path) -> Files:
    """Its files."""
    return files_of(artifact_file)
