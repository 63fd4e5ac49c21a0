"""Rows from a records database that SQLite no longer opens: read page by page, believed only where their hash is right.

Knows the parts of SQLite's file format that hold rows: leaf pages of tables, their cells and overflow chains, in the
file and in its write-ahead log (https://www.sqlite.org/fileformat2.html). What the tree above them looks like does not
matter, so a page that is gone costs the rows on it.
"""

import hashlib
import struct
from collections import ChainMap
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final, NamedTuple

__all__ = ["FoundRow", "row_digest", "salvage"]

_COLUMNS: Final = 6
_LEAF_TABLE: Final = 0x0D
_FILE_HEADER: Final = 100
_LOG_HEADER: Final = 32
_FRAME_HEADER: Final = 24
_USUAL_PAGE: Final = 4096
_PAYLOAD_AT_MOST: Final = 16 << 20

Pages = Mapping[int, bytes]


class FoundRow(NamedTuple):
    """A row whose hash is right.

    Attributes:
        number: In which order rows were written.
        key: As stored.
        task: As stored.
        body: JSON.
    """

    number: int
    key: str
    task: str
    body: str


class _Cell(NamedTuple):
    number: int
    size: int
    local: bytes
    overflow: int


def row_digest(key: str, task: str, body: str) -> str:
    """Return the hash that is stored beside a row."""
    return hashlib.sha256(f"{key} {task} {body}".encode()).hexdigest()


def salvage(path: Path) -> Iterator[FoundRow]:
    """Yield the rows of a damaged database, and of the log beside it, in the order they were written (found last).

    Args:
        path: Not open in SQLite any more; the log is named `path` + `-wal`.

    Raises:
        OSError: The file cannot be read.
    """
    content = path.read_bytes()
    beside = path.with_name(path.name + "-wal")
    log = beside.read_bytes() if beside.exists() else b""
    size = _page_size(content, log)
    usable = size - (content[20] if len(content) > 20 and content[20] <= 64 else 0)
    in_file = {at // size + 1: content[at : at + size] for at in range(0, len(content), size)}
    in_log: dict[int, bytes] = {}
    images = [*in_file.items()]
    for at in range(_LOG_HEADER, len(log) - _FRAME_HEADER, _FRAME_HEADER + size):
        number = int.from_bytes(log[at : at + 4], "big")
        in_log[number] = log[at + _FRAME_HEADER : at + _FRAME_HEADER + size]
        images.append((number, in_log[number]))
    newest = ChainMap(in_log, in_file)
    found: dict[tuple[str, str, str], int] = {}
    for number, page in images:
        for cell in _cells(page, _FILE_HEADER if number == 1 else 0, usable):
            row = _row(cell, newest if cell.overflow else {}, usable)
            if row is None and cell.overflow:
                row = _row(cell, in_file, usable)
            if row is not None:
                fact = row.key, row.task, row.body
                found[fact] = max(row.number, found.get(fact, 0))  # found again it was moved, and old pages hold both
    yield from sorted(FoundRow(number, *fact) for fact, number in found.items())


def _page_size(content: bytes, log: bytes) -> int:
    for stated in (int.from_bytes(content[16:18], "big"), int.from_bytes(log[8:12], "big")):
        size = 65536 if stated == 1 else stated
        if 512 <= size <= 65536 and size & (size - 1) == 0:
            return size
    return _USUAL_PAGE


def _cells(page: bytes, start: int, usable: int) -> Iterator[_Cell]:
    """Yield the cells of a page, if it is a leaf of a table."""
    if len(page) < start + 8 or page[start] != _LEAF_TABLE:
        return
    (count,) = struct.unpack_from(">H", page, start + 3)
    for index in range(min(count, (usable - start - 8) // 2)):
        place = start + 8 + 2 * index
        if place + 2 > len(page):
            return
        (at,) = struct.unpack_from(">H", page, place)
        size, at = _varint(page, at)
        number, at = _varint(page, at)
        local = _local_bytes(size, usable)
        if 0 < size <= _PAYLOAD_AT_MOST and at + local <= len(page):
            after = at + local
            overflow = int.from_bytes(page[after : after + 4], "big") if local < size else 0
            yield _Cell(number, size, page[at:after], overflow)


def _local_bytes(size: int, usable: int) -> int:
    """Return how much of a payload lies in its cell; the rest is in overflow pages."""
    if size <= usable - 35:
        return size
    least = (usable - 12) * 32 // 255 - 23
    wanted = least + (size - least) % (usable - 4)
    return wanted if wanted <= usable - 35 else least


def _row(cell: _Cell, pages: Pages, usable: int) -> FoundRow | None:
    payload = bytearray(cell.local)
    following = cell.overflow
    while len(payload) < cell.size:
        page = pages.get(following)
        if page is None or len(page) < 4:
            return None
        payload += page[4 : 4 + min(usable - 4, cell.size - len(payload))]
        if following == int.from_bytes(page[:4], "big"):
            return None
        following = int.from_bytes(page[:4], "big")
    texts = _texts(bytes(payload))
    if texts is None:
        return None
    key, _, task, body, digest = texts
    return FoundRow(cell.number, key, task, body) if digest == row_digest(key, task, body) else None


def _texts(payload: bytes) -> list[str] | None:
    """Return the texts of a record: a null (the row's number is stored outside) and five texts; else `None`."""
    end, at = _varint(payload, 0)
    types: list[int] = []
    while at < min(end, len(payload)) and len(types) <= _COLUMNS:
        kind, at = _varint(payload, at)
        types.append(kind)
    if len(types) != _COLUMNS or types[0] != 0 or any(kind < 13 or kind % 2 == 0 for kind in types[1:]):
        return None
    texts: list[str] = []
    for kind in types[1:]:
        size = (kind - 13) // 2
        try:
            texts.append(payload[at : at + size].decode())
        except UnicodeDecodeError:
            return None
        at += size
    return texts


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """Return SQLite's variable-length integer at a place, and the place behind it."""
    value = 0
    for index in range(9):
        byte = data[at + index] if at + index < len(data) else 0
        if index == 8:
            return value << 8 | byte, at + 9
        value = value << 7 | byte & 0x7F
        if byte < 0x80:
            return value, at + index + 1
    raise AssertionError("unreachable")
