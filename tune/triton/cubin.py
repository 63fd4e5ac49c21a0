"""Registers and local memory of a compiled kernel, read from the cubin itself.

A cubin is an ELF file whose `.nv.info` sections hold attribute records: one byte of format, one of attribute, two of
size or value, then for format 4 that many bytes of payload. Read here are `REGCOUNT` and `FRAME_SIZE`, both a symbol
index and a value, as NVIDIA's `cuobjdump -elf` prints them.
"""

import struct
from typing import NamedTuple

__all__ = ["Usage", "read_usage"]

_SIZED = 4
_FRAME_SIZE = 0x11
_REGISTER_COUNT = 0x2F


class Usage(NamedTuple):
    """What one thread of a kernel needs.

    Attributes:
        registers: 32-bit registers.
        local_bytes: Local memory: spilled registers and stack.
    """

    registers: int
    local_bytes: int


def read_usage(cubin: bytes) -> Usage:
    """Read the largest register count and local memory of any kernel in a cubin.

    Raises:
        ValueError: Not a 64-bit little-endian ELF file, or one without `.nv.info`.
    """
    if cubin[:6] != b"\x7fELF\x02\x01":
        raise ValueError(f"not a 64-bit ELF file; it begins with {cubin[:6]!r}")
    table, count, names_index = _section_table(cubin)
    entry_bytes = 64
    headers = [struct.unpack_from("<IIQQQQIIQQ", cubin, table + i * entry_bytes) for i in range(count)]
    names_offset = headers[names_index][4]
    found: dict[int, list[int]] = {_FRAME_SIZE: [], _REGISTER_COUNT: []}
    for header in headers:
        start = names_offset + header[0]
        name = cubin[start : cubin.index(b"\0", start)]
        if name == b".nv.info" or name.startswith(b".nv.info."):
            _read_attributes(cubin[header[4] : header[4] + header[5]], found)
    if not found[_REGISTER_COUNT]:
        raise ValueError("a cubin without a register count in .nv.info")
    return Usage(max(found[_REGISTER_COUNT]), max(found[_FRAME_SIZE], default=0))


def _section_table(cubin: bytes) -> tuple[int, int, int]:
    (table,) = struct.unpack_from("<Q", cubin, 40)
    _, count, names_index = struct.unpack_from("<HHH", cubin, 58)
    return table, count, names_index


def _read_attributes(info: bytes, found: dict[int, list[int]]) -> None:
    at = 0
    while at + 4 <= len(info):
        kind, attribute, size = struct.unpack_from("<BBH", info, at)
        at += 4
        if kind != _SIZED:
            continue
        if attribute in found and size >= 8:
            found[attribute].append(struct.unpack_from("<II", info, at)[1])
        at += size
