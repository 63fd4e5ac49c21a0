"""Documentation leads somewhere: links, anchors, files, names and commands that pages mention exist."""

import ast
import importlib
import re
from pathlib import Path

import pytest
from sources import ROOMS, ROOT, tracked_files

from tune_model.runtime.operators.allowed import _OWN

PAGES = [path for path in tracked_files() if path.suffix == ".md"]
NAMES = [str(path.relative_to(ROOT)) for path in PAGES]
TEXTS = {str(path.relative_to(ROOT)): path.read_text(encoding="utf-8") for path in PAGES}
FOLDERS = (*ROOMS, "benchmarks", "docs", "examples", "tests", ".ci")


def anchors(text: str) -> set[str]:
    """As GitHub makes them of headings."""
    headings = re.findall(r"(?m)^#+ (.*)$", text)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("name", NAMES)
def test_links_resolve(name: str):
    for target in re.findall(r"\]\(([^)\s]+)\)", TEXTS[name]):
        if re.match(r"https?:", target):
            continue
        path, _, anchor = target.partition("#")
        place = (ROOT / name).parent / path if path else ROOT / name
        assert place.exists(), f"{name}: {target}"
        if anchor:
            assert anchor in anchors(place.read_text(encoding="utf-8")), f"{name}: {target}"


@pytest.mark.parametrize("name", NAMES)
def test_files_that_are_mentioned_exist(name: str):
    """In code, a path that begins with a folder of this repository."""
    mentioned = re.findall(rf"(?<![\w/.-])((?:{'|'.join(map(re.escape, FOLDERS))})/[\w./-]*\w)", TEXTS[name])
    gone = [path for path in mentioned if not ((ROOT / path).exists() or list(ROOT.glob(f"{path}.*")))]
    assert gone == []


@pytest.mark.parametrize("name", NAMES)
def test_names_of_the_package_that_are_mentioned_exist(name: str):
    for dotted in set(re.findall(r"\btune_model((?:\.\w+)+)", TEXTS[name])):
        if f"tune_model{dotted}" in _OWN:
            continue  # an operator of programs
        found: object = importlib.import_module("tune_model")
        module = "tune_model"
        for part in dotted[1:].split("."):
            module = f"{module}.{part}"
            if not hasattr(found, part):
                importlib.import_module(module)
            found = getattr(found, part)


@pytest.mark.parametrize("name", [name for name in NAMES if "```python" in TEXTS[name]])
def test_blocks_of_python_are_python(name: str):
    for block in re.findall(r"(?s)```python\n(.*?)```", TEXTS[name]):
        ast.parse(block)


def test_there_are_pages():
    assert Path("README.md") in {Path(name) for name in NAMES}
    assert len(NAMES) > 15
