"""Records outlive a move: another path, home, user, host and environment, and nothing is measured again."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import moved_tune

import tune_model

SUPPORT = str(Path(moved_tune.__file__).parent)


def run(packages: Path, records: Path, folder: Path, **environment: str) -> dict[str, Any]:
    """Tune with the package that lies in `packages`, in a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    ours = Path(tune_model.__file__).parent.parent
    rest = [place for place in sys.path if place and Path(place) != ours]
    variables = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(packages), SUPPORT, *rest]),
        "HOME": str(folder),
        **environment,
    }
    command = [sys.executable, "-P", moved_tune.__file__, str(records)]
    done = subprocess.run(command, cwd=folder, env=variables, capture_output=True, text=True, check=False, timeout=240)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    assert Path(found["package"]) == packages / "tune_model"
    return found


def copy_package(place: Path) -> Path:
    """Copy the package with everything that its links lead to."""
    skip = shutil.ignore_patterns("__pycache__")
    shutil.copytree(Path(tune_model.__file__).parent, place / "tune_model", symlinks=False, ignore=skip)
    return place


def test_a_move_costs_no_build_and_no_measurement(tmp_path: Path):
    here = copy_package(tmp_path / "here")
    first = run(here, tmp_path / "store", tmp_path / "first", USER="ada", PRETENDED_HOST="node-1")
    assert first["builds"] > 0
    assert first["measured"] > 0
    there = copy_package(tmp_path / "opt" / "elsewhere" / "lib")
    shutil.copytree(tmp_path / "store", tmp_path / "moved" / "cache")
    second = run(
        there,
        tmp_path / "moved" / "cache",
        tmp_path / "second home",
        USER="grace",
        LOGNAME="grace",
        PRETENDED_HOST="node-2",
        LANG="tr_TR.UTF-8",
        TZ="Pacific/Auckland",
        TMPDIR=str(tmp_path),
        XDG_CACHE_HOME=str(tmp_path / "caches"),
        PYTHONHASHSEED="7",
        SOMETHING_ELSE="1",
    )
    assert second["package"] != first["package"]
    assert second["host"] != first["host"]
    assert (second["builds"], second["measured"]) == (0, 0)
    assert second["digest"] == first["digest"]
    assert first["leaks"] == second["leaks"] == []
