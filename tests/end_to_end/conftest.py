import pytest
import small_tune


@pytest.fixture(scope="session")
def little(tmp_path_factory: pytest.TempPathFactory) -> small_tune.Folder:
    """A small network, tuned. Copy it before changing it."""
    return small_tune.tune(small_tune.write_model(tmp_path_factory.mktemp("little")))
