"""Where compilers may keep results for the rest of a run, so that tasks that differ in a size share their kernels.

Set around the work of a build process by the pool and read by whoever calls a compiler; families need not know.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Final

__all__ = ["compiler_cache", "use_compiler_cache"]

_FOLDER: Final[ContextVar[Path | None]] = ContextVar("compiler_cache", default=None)


def compiler_cache() -> Path | None:
    """Return the folder, shared by all build processes of a run; `None` where results must not be kept."""
    return _FOLDER.get()


@contextmanager
def use_compiler_cache(folder: Path) -> Iterator[None]:
    """Let compilers keep results in `folder`, which is removed at the end of the run."""
    token = _FOLDER.set(folder)
    try:
        yield
    finally:
        _FOLDER.reset(token)
