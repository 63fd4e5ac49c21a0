from pathlib import Path

import pytest
from record_writer import timing

from tune_model.tune.candidate import Candidate, Rejected
from tune_model.tune.records.database import Finalist, Outcome, Records, Refusal
from tune_model.tune.records.holdings import superseded, take_stock

ATEN, GEMV = Candidate("aten"), Candidate("gemv", (("n", 2),))


def final(fast_us: float, *, doubtful: bool = False) -> Outcome:
    return Outcome(
        (
            Finalist(ATEN, (), 10.0, 1.0, 1.0, 1.0, 1, unconditional=True, doubtful=doubtful),
            Finalist(GEMV, (), fast_us, 10.0 / fast_us, 1.0, 3.0, 1, unconditional=True),
        )
    )


@pytest.fixture
def records(tmp_path: Path) -> Records:
    made = Records(tmp_path / "records.sqlite")
    made.add("k1", "a", timing(3.0))
    made.add("k1", "a", timing(2.0))
    made.add("k1", "a", timing(2.5, rung=1))
    made.add("k2", "a", Refusal(GEMV, Rejected("wrong", "error 0.5")))
    made.add("race", "a", final(5.0))
    made.add("race", "a", final(4.0))
    made.add("race on another machine", "a", final(8.0))
    made.add("k3", "b", timing(7.0))
    return made


def test_what_is_known_of_each_task(records: Records):
    a, b = take_stock(records.numbers()).tasks
    assert (a.task, a.timings, a.refusals, a.races, a.candidates) == ("a", 3, 1, 2, 1)
    assert (a.extern_us, a.best, a.best_us, a.failed) == (10.0, "gemv(n=2)", 8.0, "")
    assert (b.task, b.timings, b.races, b.best, b.extern_us) == ("b", 1, 0, "", 0.0)


def test_counts_of_the_whole(records: Records):
    stock = take_stock(records.numbers())
    assert stock.kinds == {"timing": 4, "outcome": 3, "refusal": 1}
    assert stock.reasons == {"wrong": 1}
    assert (stock.superseded, stock.damaged) == (2, 0)


def test_of_several_for_one_fact_all_but_the_last_are_superseded(records: Records):
    rows = records.numbers()
    assert superseded(rows) == [1, 5]
    assert records.remove(superseded(rows)) == 2
    # What counts is what counted before.
    assert records.timing("k1", 0) == timing(2.0)
    assert records.timing("k1", 1) == timing(2.5, rung=1)
    assert records.outcome("race") == final(4.0)
    assert superseded(records.numbers()) == []


def test_a_failed_and_a_disturbed_race_say_so(tmp_path: Path):
    records = Records(tmp_path / "records.sqlite")
    records.add("r1", "a", Outcome((), "out of memory: tried to allocate 1 TB"))
    records.add("r2", "b", final(5.0, doubtful=True))
    found = {t.task: t for t in take_stock(records.numbers()).tasks}
    assert (found["a"].failed, found["a"].best) == ("out of memory: tried to allocate 1 TB", "")
    assert found["b"].doubtful
    assert not found["a"].doubtful


def test_a_row_changed_on_the_disk_is_counted_and_can_be_removed(records: Records):
    with records.connection:
        records.connection.execute("update records set body = replace(body, '7.0', '0.1') where task = 'b'")
    rows = records.numbers()
    assert [number for number, row in rows.items() if row is None] == [8]
    assert take_stock(rows).damaged == 1
    records.remove([8])
    assert take_stock(records.numbers()).damaged == 0


def test_removing_gives_the_space_back(tmp_path: Path):
    path = tmp_path / "records.sqlite"
    records = Records(path)
    for number in range(3000):
        records.connection.execute(
            "insert into records (key, kind, task, body, digest) values (?, 'timing', 't', ?, ?)",
            (str(number), "x" * 300, str(number)),
        )
    records.connection.commit()
    records.connection.execute("pragma wal_checkpoint(truncate)")
    before = path.stat().st_size
    assert records.remove(range(1, 3001)) == 3000
    records.close()
    assert path.stat().st_size < before / 10
