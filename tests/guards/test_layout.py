import os
from pathlib import Path

import pytest
from sources import ROOMS, ROOT, tracked_files

import tune_model

LINES_AT_MOST = 600


def test_every_room_has_its_relative_link():
    links = {path.name: str(path.readlink()) for path in (ROOT / "src" / "tune_model").iterdir() if path.is_symlink()}
    assert links == {room: f"../../{room}" for room in ROOMS}


def test_every_room_is_a_folder_with_files():
    for room in ROOMS:
        assert any(path.suffix in {".py", ".yaml"} for path in (ROOT / room).iterdir()), room


def test_configs_hold_yaml_only():
    assert {path.suffix for path in tracked_files() if path.parent == ROOT / "configs"} <= {".yaml"}


@pytest.mark.skipif(os.environ.get("TUNE_MODEL_TEST_WHEEL") != "1", reason="only `make test` installs the wheel")
def test_the_tests_run_against_the_installed_wheel():
    """A source tree on sys.path would hide files missing from the wheel."""
    origin = Path(tune_model.__file__).resolve()
    assert "site-packages" in origin.parts
    shipped = {path.relative_to(origin.parent) for path in origin.parent.rglob("*.*") if path.suffix != ".pyc"}
    sources = {Path(room, path.relative_to(ROOT / room)) for room in ROOMS for path in (ROOT / room).rglob("*.*")}
    missing = {path for path in sources if path.suffix in {".py", ".yaml", ".jinja", ".cpp", ".h"}} - shipped
    assert not missing


def test_no_file_is_longer_than_a_reader_can_hold():
    lengths = {
        str(path.relative_to(ROOT)): path.read_text(encoding="utf-8").count("\n")
        for path in tracked_files()
        if path.suffix in {".py", ".cpp", ".h", ".jinja"}
    }
    assert {name: lines for name, lines in lengths.items() if lines > LINES_AT_MOST} == {}
