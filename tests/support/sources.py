"""The checkout's own files, for guards that read source text."""

import ast
import subprocess
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
PYTHON_ROOMS = ("runtime", "extract", "tune", "package", "pipeline")
ROOMS = (*PYTHON_ROOMS, "configs")


def tracked_files() -> list[Path]:
    """Files that git tracks and that still exist, links left out; all files of the rooms where there is no git."""
    try:
        listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return [path for room in ROOMS for path in (ROOT / room).rglob("*.*") if "__pycache__" not in path.parts]
    paths = [ROOT / name for name in listed.decode().split("\0") if name]
    return [path for path in paths if path.is_file() and not path.is_symlink()]


def room_modules(*rooms: str) -> Iterator[tuple[Path, ast.Module]]:
    """Every Python file of `rooms` (default all), relative to the root, with its syntax tree."""
    for room in rooms or PYTHON_ROOMS:
        for path in sorted((ROOT / room).rglob("*.py")):
            yield path.relative_to(ROOT), ast.parse(path.read_text(encoding="utf-8"))
