"""Where an artifact's or a bundle's files go, one after the other: into one file, or into a folder."""

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, Protocol

from tune_model.package.format.archive import ArchiveWriter
from tune_model.package.output import ArtifactFormat

__all__ = ["Chunks", "Sink", "open_sink"]

Chunks = Iterable[bytes | memoryview]


class Sink(Protocol):
    """Takes files in the order they are to lie in."""

    def __call__(self, name: str, size_bytes: int, chunks: Chunks) -> None:
        """Write one file; `size_bytes` is the sum of its chunks' lengths."""
        ...


@contextmanager
def open_sink(place: Path, format_: ArtifactFormat) -> Iterator[Sink]:
    """Make a new file or folder at `place` and give what writes into it.

    Everything is on disk when the block is left: a crash after a rename must not show an empty artifact.

    Raises:
        OSError: The system refuses.
        ValueError: A file's chunks are not of the announced size.
    """
    if format_ == "file":
        with place.open("xb") as stream:
            archive = ArchiveWriter(stream)
            yield archive.add
            archive.finish()
            _settle(stream)
        return
    place.mkdir()

    def write(name: str, size_bytes: int, chunks: Chunks) -> None:
        target = place / name
        target.parent.mkdir(exist_ok=True)
        with target.open("xb") as stream:
            for chunk in chunks:
                stream.write(chunk)
            _settle(stream)
        if target.stat().st_size != size_bytes:
            raise ValueError(f"{name} announced {size_bytes} bytes and gave {target.stat().st_size}")

    yield write


def _settle(stream: BinaryIO) -> None:
    stream.flush()
    os.fsync(stream.fileno())
