import io
import struct
import zipfile
from pathlib import Path

import pytest

from tune_model.package.format import archive
from tune_model.package.format.archive import ALIGNMENT, ArchiveWriter, Stored, read_archive
from tune_model.package.format.wire import ArtifactError

MEMBERS = {"config.yaml": b"a: 1\n", "constants.safetensors": bytes(range(256)) * 9, "report.html": b""}


def packed(members: dict[str, bytes]) -> bytes:
    stream = io.BytesIO()
    writer = ArchiveWriter(stream)
    for name, data in members.items():
        writer.add(name, len(data), (data[:1], data[1:]))
    writer.finish()
    return stream.getvalue()


def test_members_come_back():
    assert {name: bytes(data) for name, data in read_archive(memoryview(packed(MEMBERS)), "x").items()} == MEMBERS
    assert read_archive(memoryview(packed({})), "x") == {}


def test_any_unzip_tool_reads_it(tmp_path: Path):
    path = tmp_path / "a.zip"
    path.write_bytes(packed(MEMBERS))
    with zipfile.ZipFile(path) as other:
        assert other.testzip() is None
        assert {name: other.read(name) for name in other.namelist()} == MEMBERS
        assert {info.date_time for info in other.infolist()} == {(1980, 1, 1, 0, 0, 0)}


def test_every_members_data_is_aligned():
    """Names of every length around a header's padding: 1 to 3 bytes left over need a whole step more."""
    for length in range(1, 65):
        name = f"programs/{'p' * length}.json"
        data = packed({name: b"0123456789abcdef"})
        assert data.index(b"0123456789abcdef") % ALIGNMENT == 0


def test_data_that_is_not_as_long_as_announced():
    with pytest.raises(ValueError, match="announced 5 bytes and gave 3"):
        ArchiveWriter(io.BytesIO()).add("config.yaml", 5, (b"abc",))


def test_large_members_use_zip64(tmp_path: Path):
    """A sparse file of 5 GiB: sizes and offsets beyond 32 bits, read by us and listed by Python's own reader."""
    size = 5 << 30
    members = [Stored("weights.safetensors", size, 0), Stored("config.yaml", 3, 0x352441C2)]
    placed = archive._place(members)
    path = tmp_path / "large.tuned"
    with path.open("wb") as stream:
        stream.write(placed[0].header)
        stream.seek(placed[1].start)
        stream.write(placed[1].header + b"abc" + archive._directory(members, placed))
    with zipfile.ZipFile(path) as other:
        assert [(i.filename, i.file_size) for i in other.infolist()] == [(m.name, m.size_bytes) for m in members]
        assert other.read("config.yaml") == b"abc"
    import mmap

    with path.open("rb") as stream, mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as buffer:
        view = memoryview(buffer)
        found = read_archive(view, "large")
        assert len(found["weights.safetensors"]) == size
        assert bytes(found["config.yaml"]) == b"abc"
        for part in (*found.values(), view):
            part.release()


@pytest.mark.parametrize("count", [9000, 65535])
def test_a_directory_that_claims_too_much(count: int):
    data = bytearray(packed(MEMBERS))
    data[-14:-10] = struct.pack("<2H", count, count)
    with pytest.raises(ArtifactError):
        read_archive(memoryview(bytes(data)), "x")


def test_a_size_beyond_the_file():
    data = packed(MEMBERS)
    entry = data.index(b"PK\x01\x02")
    forged = data[: entry + 20] + struct.pack("<2I", 1 << 30, 1 << 30) + data[entry + 28 :]
    with pytest.raises(ArtifactError, match=r"the size of config\.yaml is 1073741824"):
        read_archive(memoryview(forged), "x")
