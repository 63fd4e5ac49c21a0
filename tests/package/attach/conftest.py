"""Artifacts of small models in which the plain operators won everywhere, and the models themselves."""

from collections.abc import Callable
from pathlib import Path

import pytest
from untuned import untuned

from tune_model.extract.plan import extract
from tune_model.extract.request import Request
from tune_model.package.contents import ArtifactContents
from tune_model.package.write import write_artifact

WriteArtifact = Callable[[str, Request], Path]


@pytest.fixture(scope="session")
def write(tmp_path_factory: pytest.TempPathFactory) -> WriteArtifact:
    """Extract a request and write what came of it; once per name."""
    folder = tmp_path_factory.mktemp("artifacts")

    def make(name: str, request: Request) -> Path:
        path = folder / f"{name}.tuned"
        if not path.exists():
            found = extract(request, check=False)
            contents = ArtifactContents(name, request, untuned(found.plan), found.constants, f"name: {name}\n")
            write_artifact(path, contents)
        return path

    return make
