"""Counts of what ran, and the file a server writes them to."""

import json
import threading
from pathlib import Path

import msgspec
import pytest

from tune_model.runtime.coverage import (
    Coverage,
    CoverageFileError,
    CoverageRecord,
    CoverageRow,
    Outcome,
    Tally,
    read_coverage,
)


def row(outcome: Outcome, calls: int, rows: int = 1) -> CoverageRow:
    candidate = "" if outcome == "miss" else "fast"
    return CoverageRow("forward", "abc", "matmul linear", (rows,), outcome, candidate, (1,), (), calls)


def tally(runs: int, *rows: CoverageRow, **sizes: int) -> Tally:
    made = Tally(rows, "forward", tuple(sorted(sizes.items())))
    made.runs = runs
    return made


@pytest.fixture
def coverage() -> Coverage:
    made = Coverage()
    made.add(tally(100, row("exact", 3), batch=1))
    made.add(tally(7, row("near", 2, 5), row("exact", 1), batch=5))
    made.add(tally(2, row("miss", 3, 9), batch=9))
    made.add(tally(0, row("miss", 3, 10), batch=10))
    return made


def test_points_are_sizes_with_what_one_run_runs_worst_first(coverage: Coverage):
    assert [(p.sizes, p.runs, p.exact, p.near, p.miss) for p in coverage.points()] == [
        ({"batch": 9}, 2, 0, 0, 3),
        ({"batch": 5}, 7, 1, 2, 0),
        ({"batch": 1}, 100, 3, 0, 0),
    ]


def test_a_dropped_plan_keeps_its_point_and_adds_to_a_later_one(coverage: Coverage):
    dropped = tally(5, row("near", 2, 5), row("exact", 1), batch=5)
    coverage.add(dropped)
    coverage.retire(dropped)
    again = tally(1, row("near", 2, 5), row("exact", 1), batch=5)
    coverage.add(again)
    coverage.retire(again)
    assert next(p.runs for p in coverage.points() if p.sizes == {"batch": 5}) == 7 + 5 + 1


def test_the_file_comes_back(coverage: Coverage, tmp_path: Path):
    coverage.save(tmp_path / "coverage.json")
    record = read_coverage(tmp_path / "coverage.json")
    assert record == CoverageRecord(2, coverage.points(), coverage.rows(), 0)
    assert [p.name for p in tmp_path.iterdir()] == ["coverage.json"]


def test_the_file_is_stable(coverage: Coverage, tmp_path: Path):
    """Servers and dashboards read these names: a change raises RECORD_SCHEMA."""
    coverage.save(tmp_path / "coverage.json")
    document = json.loads((tmp_path / "coverage.json").read_text(encoding="utf-8"))
    assert document["points"][0] == {
        "program": "forward", "sizes": {"batch": 9}, "runs": 2, "exact": 0, "near": 0, "miss": 3
    }  # fmt: skip
    assert document["rows"][0] == {
        "program": "forward", "form": "abc", "label": "matmul linear", "dims": [9], "outcome": "miss",
        "candidate": "", "tuned_at": [1], "reasons": [], "calls": 6,
    }  # fmt: skip
    assert (document["schema"], document["uncounted"]) == (2, 0)
    assert set(document) == {"schema", "points", "rows", "uncounted", "model"}


def test_saving_again_replaces_the_file_and_a_failure_leaves_the_old_one(coverage: Coverage, tmp_path: Path):
    place = tmp_path / "coverage.json"
    coverage.save(place)
    coverage.add(tally(1, row("exact", 1), batch=2))
    coverage.save(place)
    assert len(read_coverage(place).points) == 4
    (tmp_path / "folder").mkdir()
    with pytest.raises(OSError, match="directory"):
        coverage.save(tmp_path / "folder")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["coverage.json", "folder"]


def test_it_may_be_saved_while_it_counts(coverage: Coverage, tmp_path: Path):
    stop = threading.Event()

    def count() -> None:
        number = 0
        while not stop.is_set():
            number += 1
            one = tally(1, row("near", 1, number), batch=number)
            coverage.add(one)
            coverage.retire(one)

    thread = threading.Thread(target=count)
    thread.start()
    try:
        for _ in range(5):
            coverage.save(tmp_path / "coverage.json")
            assert read_coverage(tmp_path / "coverage.json").points
    finally:
        stop.set()
        thread.join()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "expected what coverage"),
        ("[]", "expected what coverage"),
        ('{"schema": 1}', "points"),
        ('{"schema": 3, "points": [], "rows": [], "uncounted": 0}', r"\$\.schema is 3; expected 1 to 2"),
        ('{"schema": 2, "points": [], "rows": [], "uncounted": 0, "model": "a"}', r"\$\.model"),
        ('{"schema": 1, "points": [{"program": 3}], "rows": [], "uncounted": 0}', r"\$\.points\[0\]"),
        ("\xff\xfe", "expected what coverage"),
        ("[" * 5000, "expected what coverage"),
    ],
)
def test_what_is_no_such_file_is_refused(tmp_path: Path, text: str, message: str):
    place = tmp_path / "coverage.json"
    place.write_text(text, encoding="latin-1")
    with pytest.raises(CoverageFileError, match=message):
        read_coverage(place)


def test_points_of_a_full_table_are_left_out(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("tune_model.runtime.coverage._ROWS_AT_MOST", 2)
    coverage = Coverage()
    for number in range(1, 5):
        one = tally(1, row("near", 1, number), batch=number)
        coverage.add(one)
        coverage.retire(one)
    assert len(coverage.points()) == 2
    assert coverage.uncounted == 2
    assert msgspec.json.encode(coverage.points())


def test_single_operators_are_no_points_of_a_program():
    """They were points of a program without a name, which no artifact has."""
    coverage = Coverage()
    operator = Tally((CoverageRow("operators", "", "linear", (4, 8), "miss", "", None, ("why",), 1),))
    forward = Tally(
        (CoverageRow("forward", "f", "matmul", (1,), "exact", "c", None, (), 2),), "forward", (("batch", 1),)
    )
    for tally in (operator, forward):
        coverage.add(tally)
        tally.runs = 3
    for _ in range(2):
        assert [(point.program, point.runs) for point in coverage.points()] == [("forward", 3)]
        assert {row.program for row in coverage.rows()} == {"operators", "forward"}
        if operator in coverage._live:
            coverage.retire(operator)
