"""What every test shares. Fakes live in tests/support, one file each."""

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def repository() -> Path:
    """The root of the checkout the tests lie in (the package itself may be installed elsewhere)."""
    return Path(__file__).resolve().parent.parent
