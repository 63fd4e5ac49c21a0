"""Hashes of the source files that results depend on, so that records of an older kernel or protocol are not believed.

Of a family: its module and, transitively, every module of this room that it imports, without the room's core types; and
the templates and C++ headers that lie beside any of them. Of a measurement: the module that takes it and all that it
imports of this room and of `runtime`, since that is the code between a kernel and its time. Only modules' names enter a
hash, not where they lie.
"""

import ast
import hashlib
import importlib.util
import inspect
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Final

from tune_model.tune.candidate import Family
from tune_model.tune.records.identity import FamilySource

__all__ = ["digest_family", "digest_measuring"]

_ROOM: Final = "tune_model.tune"
_RUNTIME: Final = "tune_model.runtime"
_CORE: Final = {f"{_ROOM}.{name}" for name in ("candidate", "choice", "target", "families")}
"""Types that every family shares; changing them changes no kernel. `families` is the list of all of them."""

_BESIDE: Final = {".cpp", ".h", ".jinja"}


def digest_family(family: Family) -> FamilySource:
    """Hash the files that a family is made of.

    Raises:
        TypeError: The family's class has no source file.
    """
    module = type(family).__module__
    files = _closure(module)
    if not files:
        msg = f"family {family.name!r} is defined in {module}, which has no source file; expected a module in a file"
        raise TypeError(msg)
    return FamilySource(family.name, family.version, _digest(files))


def digest_measuring(module: str) -> str:
    """Hash the files that a measurement runs through besides the candidate's own: `runtime`, inputs, reference, clocks.

    Args:
        module: That takes it: the workbench for a task, the step bench for a whole program.

    Raises:
        TypeError: It has no source file.
    """
    files = _closure(module, (_ROOM, _RUNTIME))
    if not files:
        msg = f"{module} has no source file; expected a module in a file"
        raise TypeError(msg)
    return _digest(files)


def _digest(files: Mapping[str, Path]) -> str:
    digest = hashlib.sha256()
    for name in sorted(files):
        digest.update(name.encode())
        digest.update(hashlib.sha256(files[name].read_bytes()).digest())
    return digest.hexdigest()[:32]


def _closure(module: str, rooms: tuple[str, ...] = (_ROOM,)) -> dict[str, Path]:
    """Return the files by a name that does not tell where they are installed."""
    inside = tuple(f"{room}." for room in rooms)
    files: dict[str, Path] = {}
    waiting = [module]
    seen: set[str] = set()
    while waiting:
        name = waiting.pop()
        if name in seen:
            continue
        seen.add(name)
        path = _file_of(name)
        if path is None:
            continue
        files[name] = path
        for beside in sorted(path.parent.iterdir()) if name.startswith(_ROOM + ".") else ():
            if beside.suffix in _BESIDE:
                files[f"{name.rpartition('.')[0]}/{beside.name}"] = beside
        waiting += [found for found in _imports(path) if found.startswith(inside) and found not in _CORE]
    return files


def _file_of(module: str) -> Path | None:
    try:
        spec = importlib.util.find_spec(module)
    except (ImportError, ValueError):
        spec = None
    if spec is not None and spec.origin is not None:
        path = Path(spec.origin)
        return path if path.suffix == ".py" else None
    loaded = inspect.sys.modules.get(module)  # type: ignore[attr-defined]
    origin = getattr(loaded, "__file__", None)
    return Path(origin) if origin else None


@lru_cache(maxsize=256)
def _imports(path: Path) -> tuple[str, ...]:
    names: list[str] = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.append(node.module)
            names += [f"{node.module}.{alias.name}" for alias in node.names]
    return tuple(names)
