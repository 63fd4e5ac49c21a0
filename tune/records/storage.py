"""What the records ask of a file system: whether it is shared over a network, and locks that end with their owner."""

import fcntl
import os
import shutil
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Final
from urllib.parse import quote

__all__ = ["exclusive", "network_file_system", "snapshot"]

_NETWORK: Final = frozenset(
    {
        "9p",
        "afs",
        "beegfs",
        "ceph",
        "cifs",
        "fuse.glusterfs",
        "fuse.s3fs",
        "fuse.sshfs",
        "glusterfs",
        "gpfs",
        "lustre",
        "ncpfs",
        "nfs",
        "nfs4",
        "orangefs",
        "pvfs2",
        "smb3",
        "smbfs",
        "virtiofs",
    }
)


def network_file_system(path: Path, mounts: Path = Path("/proc/self/mountinfo")) -> str | None:
    """Return the type of the file system that a path lies on if other machines may share it, else `None`.

    Args:
        path: Need not exist.
        mounts: As Linux lists them (proc_pid_mountinfo(5)).
    """
    try:
        lines = mounts.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return None
    place = path.resolve()
    best, kind = -1, ""
    for line in lines:
        before, _, after = line.partition(" - ")
        fields = before.split()
        if len(fields) < 5 or not after:
            continue
        point = Path(_unescape(fields[4]))
        if (place == point or point in place.parents) and len(point.parts) >= best:
            best, kind = len(point.parts), after.split()[0]
    return kind if kind in _NETWORK else None


def snapshot(path: Path, folder: Path) -> Path:
    """Copy a database as it is now into a folder, and leave it alone: others may write it, and it may be damaged.

    Raises:
        OSError: It cannot be read, or not be copied.
    """
    copy = folder / path.name
    try:
        with (
            closing(sqlite3.connect(f"file:{quote(str(path.resolve()))}?mode=ro", uri=True)) as source,
            closing(sqlite3.connect(copy)) as target,
        ):
            source.backup(target)
    except sqlite3.Error:  # damaged, say: what can be read is read from the copy
        for name in (path.name, f"{path.name}-wal"):
            (folder / name).unlink(missing_ok=True)
            if (path.parent / name).exists():
                shutil.copyfile(path.parent / name, folder / name)
        (folder / f"{path.name}-journal").unlink(missing_ok=True)
    return copy


@contextmanager
def exclusive(path: Path) -> Iterator[None]:
    """Hold a lock on a file, which is made if need be. The kernel gives it back when its owner dies, however that is.

    Raises:
        OSError: The file cannot be made, or the file system has no locks.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _unescape(text: str) -> str:
    for code, character in (("\\040", " "), ("\\011", "\t"), ("\\012", "\n"), ("\\134", "\\")):
        text = text.replace(code, character)
    return text
