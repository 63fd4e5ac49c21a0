import ast
import os
import subprocess
import sys

import pytest
from sources import ROOT, room_modules

ABSENT = ("triton", "transformers", "onnx", "torch._inductor")


def run_without(modules: tuple[str, ...], code: str) -> subprocess.CompletedProcess[str]:
    """Run `code` in a new interpreter in which `modules` cannot be imported."""
    prelude = f"import sys\nfor name in {modules!r}: sys.modules[name] = None\n"
    return subprocess.run(
        [sys.executable, "-P", "-c", prelude + code], capture_output=True, text=True, check=False, env={**os.environ}
    )


@pytest.mark.parametrize("room", ["tune_model", "tune_model.runtime", "tune_model.package"])
def test_what_a_server_imports_works_without_compilers_and_tracers(room: str):
    """Every module of the runtime, and the loader, with the heavy packages absent and Dynamo never imported."""
    code = f"""
import importlib, pkgutil
room = importlib.import_module({room!r})
if {room!r} == "tune_model.runtime":
    for module in pkgutil.walk_packages(room.__path__, room.__name__ + "."):
        importlib.import_module(module.name)
if {room!r} == "tune_model":
    [getattr(room, name) for name in room.__all__]
assert "torch._dynamo" not in sys.modules, "torch._dynamo was imported"
"""
    done = run_without(ABSENT, code)
    assert done.returncode == 0, done.stderr


LOAD = """
import warnings
import tune_model
warnings.simplefilter("ignore")  # it was tuned on another machine
tune_model.load({artifact!r}, device="cpu")
rooms = [name for name in sys.modules if name.split(".")[0] == "tune_model" and name.count(".") > 1]
print(*[name for name in rooms if name.split(".")[1] in {{"extract", "tune", "pipeline"}}])
"""

TYPES_OF_ARTIFACTS = {
    "extract.request",
    "extract.task",
    "tune.candidate",
    "tune.choice",
    "tune.measuring",
    "tune.measuring.nvml",
    "tune.records",
    "tune.records.facts",
    "tune.search",
    "tune.search.descent",
    "tune.target",
}


def test_a_server_needs_only_what_the_documentation_says():
    """torch, numpy and msgspec; of the other rooms the types that an artifact is stored in."""
    other = ("click", "jinja2", "rich", "yaml", "safetensors", "cryptography", "fastapi")
    done = run_without((*ABSENT, *other), LOAD.format(artifact=str(ROOT / "tests" / "data" / "schema-1.tuned")))
    assert done.returncode == 0, done.stderr
    assert {name.removeprefix("tune_model.") for name in done.stdout.split()} <= TYPES_OF_ARTIFACTS


def test_importing_the_package_imports_no_torch():
    done = run_without((), "import tune_model\nassert 'torch' not in sys.modules")
    assert done.returncode == 0, done.stderr


def test_the_command_answers_help_without_torch():
    done = run_without(("torch", *ABSENT), "from tune_model.pipeline.cli import main\nmain(['--help'])")
    assert done.returncode == 0, done.stderr
    assert "Usage: tune-model" in done.stdout


def test_the_runtime_names_no_compiler_internals():
    """`custom_op` pulls Dynamo in when it is called, so operators go through `torch.library.Library`."""
    banned = ("torch._inductor", "torch._dynamo", "triton", "transformers", "onnx")
    for path, tree in room_modules("runtime"):
        names = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
        names |= {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
        attributes = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
        assert not [name for name in names if name.startswith(banned)], path
        assert "custom_op" not in attributes, path


def test_rooms_do_not_print():
    """Only the command talks to the terminal (ruff's T20 covers print; this covers the streams)."""
    for path, tree in room_modules("runtime", "extract", "tune", "package"):
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "sys":
                assert node.attr not in {"stdout", "stderr", "exit"}, f"{path}:{node.lineno}"
