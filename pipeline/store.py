"""Where records and built kernels live, and whether they can, asked before a model is traced and hours are measured."""

from pathlib import Path

from tune_model.package.output import try_writing
from tune_model.runtime.errors import TuneModelError

__all__ = ["StorePlaceError", "check_store", "kernels_path", "records_path"]


class StorePlaceError(TuneModelError):
    """Records and kernels cannot be kept where they were asked for."""


def records_path(folder: Path) -> Path:
    """Return the records database of a store."""
    return folder / "records.sqlite"


def kernels_path(folder: Path) -> Path:
    """Return the folder of built kernels of a store."""
    return folder / "kernels"


def check_store(folder: Path) -> None:
    """Make sure that a store can be written at `folder`, which need not exist; leaves nothing behind.

    Raises:
        StorePlaceError: A file is in the way of a folder or a folder in that of a file, or nothing can be written.
    """
    records = records_path(folder)
    if records.exists() and not records.is_file():
        raise _refusal(records, "is not a file")
    kernels = kernels_path(folder)
    if kernels.exists() and not kernels.is_dir():
        raise _refusal(kernels, "is not a folder")
    for place in (folder, kernels):
        existing = next(path for path in (place.absolute(), *place.absolute().parents) if path.exists())
        if not existing.is_dir():
            raise _refusal(place, f"{existing} is not a folder")
        try:
            try_writing(existing / "store")
        except OSError as error:
            raise _refusal(place, f"{existing}: {error.strerror}") from error


def _refusal(place: Path, problem: str) -> StorePlaceError:
    return StorePlaceError(
        f"{place}: cannot hold records or kernels: {problem}; expected a writable folder with space, or one that can be"
        " made; choose it with --records"
    )
