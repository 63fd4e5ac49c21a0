import re
import subprocess
import sys
from pathlib import Path

import pytest

import tune_model

SERVING = (Path(__file__).resolve().parent.parent.parent / "docs" / "serving.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", tune_model.__all__)
def test_public_names_are_there_and_are_called_so(name: str):
    value = getattr(tune_model, name)
    assert name in {"__version__", getattr(value, "__name__", None)}
    assert name in dir(tune_model)


def test_public_names_are_imported_one_by_one():
    """An error class alone brings neither the loader's room nor anything of the package's other classes."""
    code = "import sys, tune_model\ntune_model.TuneModelError\nassert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-P", "-c", code], check=True)


def test_what_the_serving_page_raises_can_be_caught():
    """A server can write `except tune_model.InputError`: classes that the page names are public."""
    named = set(re.findall(r"`(?:tune_model\.)?([A-Z]\w+(?:Error|Warning))`", SERVING))
    assert len(named) > 10
    assert named <= set(tune_model.__all__)
    for name in named:
        value = getattr(tune_model, name)
        assert issubclass(value, tune_model.TuneModelError if name.endswith("Error") else UserWarning)


def test_the_serving_page_imports_public_names_alone():
    blocks = "\n".join(re.findall(r"(?m)^    .*$", SERVING))
    named = set(re.findall(r"tune_model\.(\w+)", blocks))
    assert named
    assert named <= set(tune_model.__all__)
    assert "tune_model.runtime" not in SERVING
