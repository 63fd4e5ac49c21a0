"""An artifact as one file: the one zip file that a list of members has.

Nothing is compressed, names are ASCII, every timestamp is 1980-01-01, every member's data starts at a multiple of 64
bytes (so tensors can be used where they lie) and the headers follow from names, sizes and checksums alone. So reading
does not interpret a zip file: it takes names and sizes from the directory, writes down the headers such a file must
have, and compares. What differs by a byte (compression, encryption, comments, overlaps, hidden data) is refused.
Any unzip tool can read these files; zip tools do not write them.
"""

import struct
import zlib
from collections.abc import Iterable
from typing import BinaryIO, Final, NamedTuple

from tune_model.package.format.members import MEMBERS_AT_MOST, stored_limit_of
from tune_model.package.format.wire import ArtifactError

__all__ = ["ALIGNMENT", "ARCHIVE_START", "ArchiveWriter", "Stored", "read_archive"]

ALIGNMENT: Final = 64
_END_START: Final = b"PK\x05\x06"

# PKWARE's APPNOTE 6.3.10, sections 4.3.7 (local header), 4.3.12 (directory entry), 4.3.14 to 4.3.16 (ends).
_LOCAL: Final = struct.Struct("<4s5H3I2H")
_ENTRY: Final = struct.Struct("<4s6H3I5H2I")
_END64: Final = struct.Struct("<4sQ2H2I4Q")
_LOCATOR64: Final = struct.Struct("<4sIQI")
_END: Final = struct.Struct("<4s4H2IH")

ARCHIVE_START: Final = b"PK\x03\x04"
"""What every archive begins with."""

_MAX32: Final = 0xFFFFFFFF
_DATE_1980: Final = 0x21
_UNIX_FILE: Final = 0o100644 << 16
_MADE_ON_UNIX: Final = 3 << 8
_PADDING_FIELD: Final = 0xD935  # what zipalign uses
_ZIP64_FIELD: Final = 1
_VERSION: Final = 20
_VERSION64: Final = 45


class Stored(NamedTuple):
    """One member as the directory describes it."""

    name: str
    size_bytes: int
    crc: int


class _Placed(NamedTuple):
    header: bytes
    start: int
    data: int


def _local_header(member: Stored, start: int) -> bytes:
    """Return the bytes in front of a member's data, padded so that the data is aligned."""
    large = member.size_bytes >= _MAX32
    extra = struct.pack("<2H2Q", _ZIP64_FIELD, 16, member.size_bytes, member.size_bytes) if large else b""
    padding = -(start + _LOCAL.size + len(member.name) + len(extra)) % ALIGNMENT
    if 0 < padding < 4:  # an extra field has a header of 4 bytes
        padding += ALIGNMENT
    if padding:
        extra += struct.pack("<2H", _PADDING_FIELD, padding - 4) + bytes(padding - 4)
    size = _MAX32 if large else member.size_bytes
    version = _VERSION64 if large else _VERSION
    name = member.name.encode("ascii")
    fixed = (ARCHIVE_START, version, 0, 0, 0, _DATE_1980, member.crc, size, size, len(name), len(extra))
    return _LOCAL.pack(*fixed) + name + extra


def _place(members: Iterable[Stored]) -> list[_Placed]:
    placed: list[_Placed] = []
    start = 0
    for member in members:
        header = _local_header(member, start)
        placed.append(_Placed(header, start, start + len(header)))
        start += len(header) + member.size_bytes
    return placed


def _directory(members: list[Stored], placed: list[_Placed]) -> bytes:
    """Return everything after the last member's data."""
    entries = b""
    for member, place in zip(members, placed, strict=True):
        large = [v for v in (member.size_bytes, member.size_bytes, place.start) if v >= _MAX32]
        extra = struct.pack(f"<2H{len(large)}Q", _ZIP64_FIELD, 8 * len(large), *large) if large else b""
        version = _VERSION64 if large else _VERSION
        size, start = min(member.size_bytes, _MAX32), min(place.start, _MAX32)
        name = member.name.encode("ascii")
        facts = (version | _MADE_ON_UNIX, version, 0, 0, 0, _DATE_1980, member.crc, size, size)
        entries += _ENTRY.pack(b"PK\x01\x02", *facts, len(name), len(extra), 0, 0, 0, _UNIX_FILE, start) + name + extra
    start = placed[-1].data + members[-1].size_bytes if members else 0
    count = len(members)
    end = b""
    if start >= _MAX32:
        end64 = (44, _VERSION64 | _MADE_ON_UNIX, _VERSION64, 0, 0, count, count, len(entries), start)
        end = _END64.pack(b"PK\x06\x06", *end64) + _LOCATOR64.pack(b"PK\x06\x07", 0, start + len(entries), 1)
    return entries + end + _END.pack(_END_START, 0, 0, count, count, len(entries), min(start, _MAX32), 0)


class ArchiveWriter:
    """Writes members one after the other.

    Args:
        file: New, empty, seekable.
    """

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._members: list[Stored] = []
        self._position = 0

    def add(self, name: str, size_bytes: int, chunks: Iterable[bytes | memoryview]) -> None:
        """Append one member; its checksum is filled in once its data is known.

        Args:
            name: As `members` allows.
            size_bytes: Sum of the chunks' lengths.
            chunks: The data.
        """
        header = _local_header(Stored(name, size_bytes, 0), self._position)
        self._file.write(header)
        crc = 0
        written = 0
        for chunk in chunks:
            self._file.write(chunk)
            crc = zlib.crc32(chunk, crc)
            written += len(chunk)
        if written != size_bytes:
            raise ValueError(f"{name} announced {size_bytes} bytes and gave {written}")
        member = Stored(name, size_bytes, crc)
        self._file.seek(self._position)
        self._file.write(_local_header(member, self._position))
        self._position += len(header) + size_bytes
        self._file.seek(self._position)
        self._members.append(member)

    def finish(self) -> None:
        """Write the directory."""
        self._file.write(_directory(self._members, _place(self._members)))


def read_archive(buffer: memoryview, file: str) -> dict[str, memoryview]:
    """Return the data of every member, without copying.

    Args:
        buffer: The whole file, one byte per item.
        file: For error messages.

    Raises:
        ArtifactError: The file is not, byte for byte, what `ArchiveWriter` makes of these members.
    """
    members = _list_members(buffer, file)
    placed = _place(members)
    found: dict[str, memoryview] = {}
    for member, place in zip(members, placed, strict=True):
        if buffer[place.start : place.data] != place.header:
            raise ArtifactError(file, f"the zip header of {member.name}", "as tune-model writes it", "another")
        if member.name in found:
            raise ArtifactError(file, "the zip directory", "with every name once", f"listing {member.name} twice")
        found[member.name] = buffer[place.data : place.data + member.size_bytes]
    end = placed[-1].data + members[-1].size_bytes if members else 0
    if buffer[end:] != _directory(members, placed):
        expected = "as tune-model writes it (an archive that another tool packed works as a folder: unpack it)"
        raise ArtifactError(file, "the zip directory", expected, "another")
    return found


def _list_members(buffer: memoryview, file: str) -> list[Stored]:
    total = len(buffer)
    if total < _END.size or bytes(buffer[total - _END.size : total - _END.size + 4]) != _END_START:
        if bytes(buffer[: len(ARCHIVE_START)]) != ARCHIVE_START:
            raise ArtifactError(file, "the file", "an artifact that tune-model wrote", f"{total} bytes of another kind")
        raise ArtifactError(file, "the file", "a whole artifact: copy it again", f"cut off after {total} bytes")
    _, _, _, _, count, length, start, _ = _END.unpack(buffer[total - _END.size :])
    if count > MEMBERS_AT_MOST:
        raise ArtifactError(file, "the number of files", f"at most {MEMBERS_AT_MOST}", str(count))
    ends = _END.size
    if start == _MAX32:
        ends += _END64.size + _LOCATOR64.size
    at = total - ends - length
    members: list[Stored] = []
    for _ in range(count):
        if at < 0 or at + _ENTRY.size > total:
            raise ArtifactError(file, "the zip directory", "inside the file", "outside")
        member, at = _read_entry(buffer, at, file)
        if member.size_bytes > total:
            raise ArtifactError(
                file, f"the size of {member.name}", f"at most {total}, the file's", str(member.size_bytes)
            )
        members.append(member)
    return members


def _read_entry(buffer: memoryview, at: int, file: str) -> tuple[Stored, int]:
    fields = _ENTRY.unpack(buffer[at : at + _ENTRY.size])
    crc, size, name_length, extra_length = fields[7], fields[9], fields[10], fields[11]
    at += _ENTRY.size
    raw = bytes(buffer[at : at + name_length])
    name = raw.decode("ascii", "replace")
    if stored_limit_of(name) is None:
        raise ArtifactError(file, "the zip directory", "with names of an artifact's files", f"listing {name!r}")
    at += name_length
    extra = buffer[at : at + extra_length]
    if size == _MAX32:
        if extra_length < 12:
            raise ArtifactError(file, f"the zip directory's entry of {name}", "with a zip64 size", "without")
        size = struct.unpack("<Q", extra[4:12])[0]
    return Stored(name, size, crc), at + extra_length
