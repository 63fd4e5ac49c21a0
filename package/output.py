"""Where artifacts and documents go: what a path asks for, what may be replaced, and doing it at once or not at all."""

import errno
import os
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final, Literal

from tune_model.package.format.archive import ARCHIVE_START
from tune_model.package.format.members import BUNDLE, FOLDERS, MANIFEST, stored_limit_of
from tune_model.runtime.errors import TuneModelError

__all__ = [
    "ArtifactFormat",
    "OutputError",
    "check_output",
    "choose_format",
    "staged",
    "staged_document",
    "try_writing",
]

ArtifactFormat = Literal["file", "folder"]

_ELSEWHERE: Final = "choose another path"
_ADVICE: Final = {
    errno.ENOENT: "make its folder",
    errno.ENOTDIR: "remove the file in its way",
    errno.ENOSPC: "make room",
    errno.EDQUOT: "make room",
    errno.EFBIG: "raise the limit on file sizes",
    errno.ENAMETOOLONG: "shorten the name",
}


class OutputError(TuneModelError):
    """Something cannot be written where it was asked for; nothing was left behind."""


def choose_format(path: str | os.PathLike[str]) -> ArtifactFormat:
    """Return what a path asks for: a folder when it ends in a slash, else one file."""
    return "folder" if os.fspath(path).endswith(os.sep) else "file"


def check_output(path: str | os.PathLike[str], format_: ArtifactFormat | None = None) -> Path:
    """Fail now, before hours of tuning, if an artifact could not be put at `path`; leaves nothing behind.

    Returns:
        The path without a trailing slash.

    Raises:
        OutputError: There is no folder to put it in, it is read-only, or something that is no artifact is there.
    """
    place = Path(path)
    _check_replaceable(place, format_ or choose_format(path))
    try:
        try_writing(place)
    except OSError as error:
        raise _refusal(place, error) from error
    return place


def try_writing(place: Path) -> None:
    """Write a small file beside `place` and remove it.

    Raises:
        OSError: There is no folder to put it in, or it is read-only or full.
    """
    partial = _partial(place)
    try:
        partial.write_bytes(bytes(4096))
    finally:
        _remove(partial)


@contextmanager
def staged(place: Path, format_: ArtifactFormat) -> Iterator[Path]:
    """Give a path beside `place` to write to, and put what was written there in place of what was before.

    When the block raises, whatever it wrote is removed and `place` stays as it was.

    Raises:
        OutputError: The system refused (read-only, disk full, a file where a folder is needed).
    """
    _check_replaceable(place, format_)
    partial = _partial(place)
    try:
        yield partial
        _replace(partial, place)
    except OSError as error:
        raise _refusal(place, error) from error
    finally:
        _remove(partial)


@contextmanager
def staged_document(place: Path, kind: str, beginning: bytes) -> Iterator[Path]:
    """Give a path to write a document to, and put it in place of an older one of its kind, which was there or not.

    A link is followed; a pipe or a device is written to as it is.

    Args:
        place: Where it goes.
        kind: In words: `a report`.
        beginning: How files of this kind begin; one that is empty or begins so is replaced.

    Raises:
        OutputError: Something else is there (an artifact, a database, weights), or the system refused.
    """
    try:
        if place.is_dir():
            raise OutputError(f"{place}: is a folder; expected the name of a file")
        # What /dev/stdout links to is open already, even where it is a file.
        if (place.exists() and not place.is_file()) or place.is_relative_to("/dev"):
            yield place
            return
        place = Path(os.path.realpath(place))
        if place.exists():
            with place.open("rb") as stream:
                start = stream.read(64)
            if start and not start.startswith(beginning):
                raise OutputError(f"{place}: is a file but not {kind}; expected {kind} or nothing; {_ELSEWHERE}")
        partial = _partial(place)
        try:
            yield partial
            _replace(partial, place)
        finally:
            _remove(partial)
    except OSError as error:
        raise _refusal(place, error) from error


def _partial(place: Path) -> Path:
    """Return a new name beside `place`, so that renaming stays on one file system."""
    return place.with_name(f".{place.name}.partial-{os.getpid():x}-{os.urandom(4).hex()}")


def _check_replaceable(place: Path, format_: ArtifactFormat) -> None:
    """Refuse to replace anything but an artifact of the same format."""
    if not place.name or place.name == "..":
        raise OutputError(f"{place}: names no file; expected a path such as model.tuned")
    try:
        mode = place.lstat().st_mode
        if format_ == "file":
            _check_file(place, mode)
        else:
            _check_folder(place, mode)
    except FileNotFoundError:
        return
    except OSError as error:
        raise _refusal(place, error) from error


def _check_file(place: Path, mode: int) -> None:
    if stat.S_ISDIR(mode):
        hint = "end the path in a slash for an artifact that is a folder"
        raise OutputError(f"{place}: is a folder; expected a file or nothing; {hint}")
    if not stat.S_ISREG(mode):
        raise OutputError(f"{place}: is a link or device; expected a file or nothing; {_ELSEWHERE}")
    with place.open("rb") as stream:
        if stream.read(len(ARCHIVE_START)) not in (b"", ARCHIVE_START):
            raise OutputError(f"{place}: is a file but no artifact; expected an artifact or nothing; {_ELSEWHERE}")


def _check_folder(place: Path, mode: int) -> None:
    if not stat.S_ISDIR(mode):
        raise OutputError(f"{place}: is not a folder; expected one or nothing; {_ELSEWHERE}")
    names = {entry.name for entry in place.iterdir()}
    listed = MANIFEST in names or BUNDLE in names
    if names and not (listed and all(stored_limit_of(name) or name in FOLDERS for name in names)):
        raise OutputError(f"{place}: is a folder of other things; expected an artifact or nothing; {_ELSEWHERE}")


def _replace(partial: Path, place: Path) -> None:
    if not place.is_dir():
        partial.replace(place)
        return
    # rename(2) replaces only empty folders: the old one steps aside first, and comes back if that fails.
    old = _partial(place)
    place.rename(old)
    try:
        partial.rename(place)
    except OSError:
        old.rename(place)
        raise
    _remove(old)


def _remove(path: Path) -> None:
    if os.path.isdir(path):  # noqa: PTH112 (unlike Path.is_dir, it answers for names the system refuses)
        shutil.rmtree(path)
    elif os.path.lexists(path):
        path.unlink()


def _refusal(place: Path, error: OSError) -> OutputError:
    reason = error.strerror or str(error)
    todo = _ADVICE.get(error.errno or 0, "make it writable")
    return OutputError(
        f"{place}: cannot be written: {reason}; expected a writable folder with space; {todo}, or {_ELSEWHERE}"
    )
