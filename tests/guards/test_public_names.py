import importlib
import inspect
import pkgutil

import pytest
from sources import PYTHON_ROOMS

import tune_model


@pytest.mark.parametrize("name", [name for name in tune_model.__all__ if not name.startswith("__")])
def test_public_names_resolve_and_say_what_they_promise(name: str):
    assert inspect.getdoc(getattr(tune_model, name))


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
