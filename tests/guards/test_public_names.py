import builtins
import importlib
import inspect
import pkgutil
import re
import subprocess
import sys
from pathlib import Path

import pytest
from sources import PYTHON_ROOMS

import tune_model

SERVING = (Path(__file__).resolve().parent.parent.parent / "docs" / "serving.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", [name for name in tune_model.__all__ if not name.startswith("__")])
def test_public_names_resolve_and_say_what_they_promise(name: str):
    value = getattr(tune_model, name)
    assert inspect.getdoc(value)
    assert value.__name__ == name
    assert name in dir(tune_model)


def test_unknown_names_raise_as_python_does():
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        tune_model.nonsense  # noqa: B018 (reading it is the test)


@pytest.mark.parametrize("room", PYTHON_ROOMS)
def test_exported_names_exist_and_have_docstrings(room: str):
    """`__all__` of every module of a room: nothing missing, nothing undocumented (constants excepted)."""
    package = importlib.import_module(f"tune_model.{room}")
    modules = [package.__name__, *(m.name for m in pkgutil.walk_packages(package.__path__, package.__name__ + "."))]
    for module_name in modules:
        module = importlib.import_module(module_name)
        assert module.__doc__, module_name
        for name in getattr(module, "__all__", ()):
            value = getattr(module, name)
            made_by_call = "<locals>" in getattr(value, "__qualname__", "")  # a decorator bound to a name is a constant
            if (inspect.isclass(value) or inspect.isfunction(value)) and not made_by_call:
                assert inspect.getdoc(value), f"{module_name}.{name}"


def test_public_names_are_imported_one_by_one():
    """An error class alone brings neither the loader's room nor anything of the package's other classes."""
    code = "import sys, tune_model\ntune_model.TuneModelError\nassert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-P", "-c", code], check=True)


def test_what_the_serving_page_raises_can_be_caught():
    """A server can write `except tune_model.InputError`: classes that the page names are public."""
    named = set(re.findall(r"`(?:tune_model\.)?([A-Z]\w+(?:Error|Warning))`", SERVING))
    named -= set(dir(builtins))
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
