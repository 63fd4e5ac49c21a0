"""A hash of the source files that a family's results depend on, so that records of an older kernel are not believed.

The family's module and, transitively, every module of this room that it imports, without the room's core types; and the
templates and C++ headers that lie beside any of them. Only names relative to the room enter the hash.
"""

import ast
import hashlib
import importlib.util
import inspect
from functools import lru_cache
from pathlib import Path
from typing import Final

from tune_model.tune.candidate import Family
from tune_model.tune.records.identity import FamilySource

__all__ = ["digest_family"]

_ROOM: Final = "tune_model.tune"
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
    digest = hashlib.sha256()
    for name in sorted(files):
        digest.update(name.encode())
        digest.update(hashlib.sha256(files[name].read_bytes()).digest())
    return FamilySource(family.name, family.version, digest.hexdigest()[:32])


def _closure(module: str) -> dict[str, Path]:
    """Return the files by a name that does not tell where they are installed."""
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
        waiting += [found for found in _imports(path) if found.startswith(_ROOM + ".") and found not in _CORE]
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
