import multiprocessing
import sqlite3
from pathlib import Path

import pytest
from record_writer import timing, write_many

from tune_model.tune.candidate import Candidate, Rejected
from tune_model.tune.records.database import Finalist, Outcome, Records, RecordsError, Refusal, Row, parse_rows

OUTCOME = Outcome((Finalist(Candidate("aten"), (), 10.0, 1.0, 1.0, 1.0, 1, unconditional=True),))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "deep" / "records.sqlite"


def fill(path: Path) -> None:
    records = Records(path)
    records.add("k1", "task", timing(1.5))
    records.add("k1", "task", timing(1.4, rung=1))
    records.add("k2", "task", Refusal(Candidate("gemv"), Rejected("wrong", "error 0.5")))
    records.add("race", "task", OUTCOME)
    records.close()


def test_everything_is_found_again(path: Path):
    fill(path)
    records = Records(path)
    assert records.timing("k1", 0) == timing(1.5)
    assert records.timing("k1", 1) == timing(1.4, rung=1)
    assert records.timing("k1", 2) is None
    assert records.timing("k2", 0) is None
    assert records.refusal("k2") == Rejected("wrong", "error 0.5")
    assert records.refusal("k1") is None
    assert records.outcome("race") == OUTCOME
    assert records.of_keys("task", frozenset({"k1"})) == (timing(1.5), timing(1.4, rung=1))
    assert records.moved_to is None


def test_of_several_facts_the_last_counts(path: Path):
    records = Records(path)
    records.add("k1", "task", timing(1.5))
    records.add("k1", "task", timing(2.5))
    assert records.timing("k1", 0) == timing(2.5)


def test_a_fact_that_is_found_again_counts_again(path: Path):
    """A repeated row kept its old place, so that a `--recheck` that found the first outcome again changed nothing."""
    records = Records(path)
    for us in (1.5, 2.5, 1.5):
        records.add("k1", "task", timing(us))
    assert records.timing("k1", 0) == timing(1.5)
    assert [row.body for row in Records(path).rows()] == [timing(2.5), timing(1.5)]


def test_merging_old_rows_puts_nothing_new_back(path: Path, tmp_path: Path):
    records, old = Records(path), Records(tmp_path / "old.sqlite")
    old.add("k1", "task", timing(1.5))
    records.add("k1", "task", timing(1.5))
    records.add("k1", "task", timing(2.5))
    assert records.merge(parse_rows(old.export())) == 0
    assert records.timing("k1", 0) == timing(2.5)


def test_a_candidate_that_was_timed_after_it_was_refused_is_not_out(path: Path):
    records = Records(path)
    refusal = Refusal(Candidate("gemv"), Rejected("wrong", "error 0.5"))
    records.add("k1", "task", refusal)
    records.add("k1", "task", timing(1.5))
    assert records.refusal("k1") is None
    records.add("k1", "task", refusal)
    assert records.refusal("k1") == Rejected("wrong", "error 0.5")


@pytest.mark.parametrize("reason", ["timeout", "crash", "out of memory"])
def test_what_may_pass_is_kept_but_bars_nobody(path: Path, reason: str):
    records = Records(path)
    refusal = Refusal(Candidate("gemv"), Rejected(reason, "the machine was busy"))
    records.add("k1", "task", refusal)
    assert records.refusal("k1") is None
    assert records.of_keys("task", frozenset({"k1"})) == (refusal,)


def test_a_row_is_on_disk_before_add_returns(path: Path):
    records = Records(path)
    records.add("k1", "task", timing(1.5))
    assert Records(path).timing("k1", 0) == timing(1.5)  # read while the writer is still open


def test_export_and_merge_round_trip_and_are_idempotent(path: Path, tmp_path: Path):
    fill(path)
    lines = list(Records(path).export())
    other = Records(tmp_path / "other.sqlite")
    assert other.merge(parse_rows(lines)) == 4
    assert other.merge(parse_rows(lines)) == 0
    assert list(other.export()) == lines


def test_a_line_that_is_no_record_is_named():
    good = b'{"key":"k","task":"t","body":{"type":"outcome","finalists":[],"failed":"x"}}'
    assert list(parse_rows([good])) == [Row("k", "t", Outcome((), "x"))]
    with pytest.raises(RecordsError, match="line 2"):
        list(parse_rows([good, b'{"key":1}']))


def test_a_file_that_is_no_database_is_set_aside(path: Path):
    path.parent.mkdir()
    path.write_bytes(b"not a database at all" * 100)
    records = Records(path)
    assert records.moved_to == path.with_name("records.sqlite.damaged-1")
    assert records.moved_to.read_bytes().startswith(b"not a database")
    assert records.rescued == 0
    records.add("k1", "task", timing(1.5))


def test_readable_rows_of_a_damaged_database_are_rescued(path: Path):
    records = Records(path)
    for number in range(400):
        records.add(f"k{number}", "task", timing(float(number)))
    records.connection.execute("pragma wal_checkpoint(truncate)")
    records.close()
    content = bytearray(path.read_bytes())
    middle = len(content) // 2 // 4096 * 4096
    content[middle : middle + 4096] = b"\xa5" * 4096
    path.write_bytes(content)
    again = Records(path)
    assert again.moved_to is not None
    assert 100 < again.rescued < 400
    assert again.timing("k0", 0) == timing(0.0)


def test_a_newer_schema_is_refused_not_damaged(path: Path):
    fill(path)
    connection = sqlite3.connect(path)
    connection.execute("pragma user_version = 99")
    connection.close()
    with pytest.raises(RecordsError, match="schema 99"):
        Records(path)


def test_a_place_that_cannot_hold_it_is_one_clear_error(tmp_path: Path):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(RecordsError, match="--records"):
        Records(tmp_path / "file" / "records.sqlite")
    with pytest.raises(RecordsError, match="--records"):
        Records(tmp_path)


def test_several_tuners_share_one_database(path: Path):
    context = multiprocessing.get_context("spawn")
    writers = [context.Process(target=write_many, args=(path, 50 * i)) for i in range(3)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    assert [w.exitcode for w in writers] == [0, 0, 0]
    assert len(list(Records(path).export())) == 150
