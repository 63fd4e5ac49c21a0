"""Damage, deaths and company: what was written and can still be read is kept, whoever comes first."""

import multiprocessing
import os
import random
import sqlite3
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from record_writer import count_rescued, timing, write_many

from tune_model.tune.candidate import Candidate
from tune_model.tune.records import salvage as salvage_module
from tune_model.tune.records.database import Finalist, Outcome, Records, RecordsError, Row, _set_aside
from tune_model.tune.records.salvage import salvage
from tune_model.tune.records.storage import exclusive, network_file_system

SPAWN = multiprocessing.get_context("spawn")
COUNT = 400


def large() -> Outcome:
    """An outcome that does not fit in a page."""
    finalists = [
        Finalist(
            Candidate("triton_matmul", tuple((f"parameter_{i}", i) for i in range(40))), (), 10.0, 1, 1, 1, 1, True
        )
        for _ in range(8)
    ]
    return Outcome(tuple(finalists))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A database of 400 small rows and 3 large ones, closed, all in one file."""
    path = tmp_path / "records.sqlite"
    records = Records(path)
    records.merge([])
    with records.connection:
        for number in range(COUNT):
            records._insert(row(number))
    for number in range(3):
        records.add(f"large{number}", "task", large())
    records.connection.execute("pragma wal_checkpoint(truncate)")
    records.close()
    return path


def row(number: int) -> Row:
    return Row(f"k{number}", "task", timing(float(number)))


def rewrite(path: Path, change: Callable[[bytearray], bytes | bytearray]) -> None:
    path.write_bytes(change(bytearray(path.read_bytes())))


def overwritten(start: int, content: bytes) -> Callable[[bytearray], bytearray]:
    def change(data: bytearray) -> bytearray:
        data[start : start + len(content)] = content
        return data

    return change


def test_a_sound_database_is_read_page_by_page_as_sqlite_reads_it(path: Path):
    records = Records(path)
    expected = list(records._rows(""))
    records.close()
    found = list(salvage(path))
    assert [(r.key, r.task) for r in found] == [(r.key, r.task) for r in expected]
    assert len(found) == COUNT + 3
    assert any(len(r.body) > 4096 for r in found)


def test_the_pages_are_put_together_once_and_not_for_every_large_row(path: Path, monkeypatch: pytest.MonkeyPatch):
    """Each row with an overflow page copied the table of all pages: quadratic in the size of the database."""
    tables: list[object] = []
    read = salvage_module._row

    def note(cell, pages, usable):  # type: ignore[no-untyped-def]
        tables.extend([pages] if cell.overflow else [])
        return read(cell, pages, usable)

    monkeypatch.setattr(salvage_module, "_row", note)
    assert len(list(salvage(path))) == COUNT + 3
    assert len(tables) == 3
    assert len({id(table) for table in tables}) == 1


DAMAGE: dict[str, tuple[Callable[[bytearray], bytes | bytearray], int]] = {
    "the whole header": (overwritten(0, bytes(100)), COUNT + 3),
    "the first page": (overwritten(0, b"\xa5" * 4096), COUNT + 3),
    "the tree's root": (overwritten(4096, b"\xa5" * 4096), COUNT),
    "a format of the future": (overwritten(47, b"\x09"), COUNT + 3),
    "a version that may not be written": (overwritten(18, b"\x07"), COUNT + 3),
    "half of it is gone": (lambda data: data[: len(data) // 2], 100),
    "a page in the middle": (lambda data: overwritten(len(data) // 2 // 4096 * 4096, b"\xa5" * 4096)(data), COUNT - 60),
    "an eighth of all pages": (
        lambda data: overwritten(0, b"")(
            bytearray(
                b"".join(bytes(4096) if (i // 4096) % 8 == 5 else data[i : i + 4096] for i in range(0, len(data), 4096))
            )
        ),
        COUNT // 2,
    ),
}


@pytest.mark.parametrize(("change", "least"), DAMAGE.values(), ids=DAMAGE)
def test_what_can_be_read_is_kept(path: Path, change: Callable[[bytearray], bytes | bytearray], least: int):
    rewrite(path, change)
    records = Records(path)
    assert records.moved_to is not None
    assert records.moved_to.name == "records.sqlite.damaged-1"
    assert records.moved_to.exists()
    assert records.rescued >= least
    kept = [n for n in range(COUNT) if records.timing(f"k{n}", 0) is not None]
    assert all(records.timing(f"k{n}", 0) == timing(float(n)) for n in kept)
    records.add("new", "task", timing(1.0))
    records.close()
    again = Records(path)
    assert again.moved_to is None
    assert again.timing("new", 0) == timing(1.0)


def test_rows_that_were_only_in_the_log_are_kept(tmp_path: Path):
    path = tmp_path / "records.sqlite"
    writer = Records(path)
    for number in range(50):
        writer.add(f"k{number}", "task", timing(float(number)))
    log = path.with_name("records.sqlite-wal")
    assert log.stat().st_size > 0
    copies = path.read_bytes(), log.read_bytes()
    writer.close()
    other = tmp_path / "copied" / "records.sqlite"
    other.parent.mkdir()
    other.write_bytes(b"\xff" * len(copies[0]))
    other.with_name("records.sqlite-wal").write_bytes(copies[1])
    found = {r.key for r in salvage(other)}
    assert found == {f"k{number}" for number in range(50)}


def test_a_fact_that_was_found_again_is_rescued_once_at_its_last_place(tmp_path: Path):
    """The file still holds it at its first place, and the log at its last."""
    path = tmp_path / "records.sqlite"
    writer = Records(path)
    for us in (3.0, 1.0):
        writer.add("k", "task", timing(us))
    writer.connection.execute("pragma wal_checkpoint(truncate)")
    writer.add("k", "task", timing(3.0))
    log = path.with_name("records.sqlite-wal")
    copies = path.read_bytes(), log.read_bytes()
    writer.close()
    other = tmp_path / "copied" / "records.sqlite"
    other.parent.mkdir()
    other.write_bytes(copies[0])
    other.with_name(log.name).write_bytes(copies[1])
    found = list(salvage(other))
    assert [row.number for row in found] == [2, 3]
    assert '"median_us":3.0' in found[1].body


def test_of_several_for_one_key_the_last_still_counts_after_a_rescue(tmp_path: Path):
    path = tmp_path / "records.sqlite"
    records = Records(path)
    for us in (3.0, 1.0, 2.0):
        records.add("k", "task", timing(us))
    records.connection.execute("pragma wal_checkpoint(truncate)")
    records.close()
    rewrite(path, overwritten(0, bytes(100)))
    assert Records(path).timing("k", 0) == timing(2.0)


def test_a_row_that_was_changed_on_the_disk_is_left_out(path: Path):
    """SQLite itself finds nothing wrong with a flipped digit in a text; a wrong time would be believed for ever."""
    connection = sqlite3.connect(path)
    (body,) = connection.execute("select body from records where key = 'k7'").fetchone()
    connection.close()
    rewrite(
        path,
        lambda data: bytes(data).replace(body.encode(), body.replace('"median_us":7.0', '"median_us":1.0').encode()),
    )
    records = Records(path)
    assert records.moved_to is None
    assert records.timing("k7", 0) is None
    assert records.timing("k8", 0) == timing(8.0)
    assert len(list(records.export())) == COUNT + 2


def test_random_damage_is_survived(path: Path):
    sound = path.read_bytes()
    dice = random.Random(3)  # noqa: S311 (repeatable)
    for _ in range(60):
        data = bytearray(sound)
        for _ in range(dice.choice((1, 1, 1, 5, 50))):
            data[dice.randrange(len(data))] = dice.randrange(256)
        if dice.random() < 0.2:
            data = data[: dice.randrange(len(data))]
        path.write_bytes(data)
        try:
            records = Records(path)
            for number in range(0, COUNT, 40):
                assert records.timing(f"k{number}", 0) in {None, timing(float(number))}
            records.add("new", "task", timing(1.0))
            records.close()
        except RecordsError:
            pass  # a version of the future, a table of other columns
        for beside in path.parent.iterdir():
            beside.unlink()


def test_several_tuners_find_the_damage_and_one_repairs_it(path: Path, tmp_path: Path):
    rewrite(path, overwritten(0, bytes(100)))
    told = [tmp_path / f"told{i}" for i in range(4)]
    finders = [SPAWN.Process(target=count_rescued, args=(path, t)) for t in told]
    for finder in finders:
        finder.start()
    for finder in finders:
        finder.join()
    rescued = sorted(int(t.read_text()) for t in told)
    assert rescued == [-1, -1, -1, COUNT + 3]
    assert not path.with_name("records.sqlite.damaged-2").exists()


def test_one_that_had_it_open_goes_on_in_the_rebuilt_file(path: Path):
    early = Records(path)
    _set_aside(path)  # what another tuner does that finds damage
    late = Records(path)
    late.merge([row(3)])
    early.add("early", "task", timing(1.0))
    assert late.timing("early", 0) == timing(1.0)
    assert early.timing("k3", 0) == timing(3.0)


def test_one_whose_file_was_removed_makes_a_new_one(path: Path):
    records = Records(path)
    path.unlink()
    records.add("k", "task", timing(1.0))
    assert Records(path).timing("k", 0) == timing(1.0)


def test_eight_tuners_share_a_database_and_one_is_killed(tmp_path: Path):
    path = tmp_path / "records.sqlite"
    told = [tmp_path / f"told{i}" for i in range(8)]
    writers = [SPAWN.Process(target=write_many, args=(path, 1000 * i, 150, told[i])) for i in range(8)]
    for writer in writers:
        writer.start()
    deadline = time.monotonic() + 60
    while not (told[3].exists() and told[3].read_text().count("\n") > 20) and time.monotonic() < deadline:
        time.sleep(0.005)
    writers[3].kill()
    for writer in writers:
        writer.join(120)
    assert [w.exitcode for w in writers] == [0, 0, 0, -9, 0, 0, 0, 0]
    records = Records(path)
    assert records.moved_to is None
    stored = {r.key for r in records._rows("")}
    assert stored >= {key for t in told for key in t.read_text().split()}
    assert 7 * 150 + 20 < len(stored) < 8 * 150


def test_a_lock_ends_with_its_owner(tmp_path: Path):
    lock = tmp_path / "lock"
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(read)
        with exclusive(lock):
            os.write(write, b".")
            time.sleep(1000)
    os.close(write)
    assert os.read(read, 1) == b"."
    os.close(read)
    os.kill(pid, 9)
    os.waitpid(pid, 0)
    with exclusive(lock):
        pass


MOUNTS = r"""22 1 0:20 / / rw,relatime - ext4 /dev/sda1 rw
30 22 0:31 / /mnt/shared rw,relatime shared:1 - nfs4 server:/export rw,vers=4.2
31 30 0:32 / /mnt/shared/local rw - tmpfs tmpfs rw
32 22 0:33 / /mnt/my\040drive rw - cifs //server/x rw
"""


@pytest.mark.parametrize(
    ("place", "kind"),
    [
        ("/var/cache", None),
        ("/mnt/shared/records.sqlite", "nfs4"),
        ("/mnt/shared2/records.sqlite", None),
        ("/mnt/shared/local/records.sqlite", None),
        ("/mnt/my drive/a/b", "cifs"),
    ],
)
def test_network_file_systems_are_recognised(tmp_path: Path, place: str, kind: str | None):
    mounts = tmp_path / "mountinfo"
    mounts.write_text(MOUNTS)
    assert network_file_system(Path(place), mounts) == kind
    link = tmp_path / "link"
    link.symlink_to(place)
    assert network_file_system(link / "records.sqlite", mounts) == kind
    assert network_file_system(Path(place), tmp_path / "missing") is None


def test_over_a_network_the_old_journal_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("tune_model.tune.records.database.network_file_system", lambda _path: "nfs4")
    records = Records(tmp_path / "records.sqlite")
    assert records.connection.execute("pragma journal_mode").fetchone() == ("delete",)
    records.add("k", "task", timing(1.0))
    assert Records(tmp_path / "records.sqlite").timing("k", 0) == timing(1.0)
    assert not (tmp_path / "records.sqlite-wal").exists()
