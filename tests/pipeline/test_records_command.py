"""`tune-model records`: list, stats, prune, merge, export."""

import gzip
import json
import sqlite3
import tempfile
from contextlib import closing
from pathlib import Path

import pytest
import two_layers
from record_writer import timing

from tune_model.package.write import write_artifact
from tune_model.pipeline import cli
from tune_model.tune.candidate import Candidate, Rejected
from tune_model.tune.records.database import Finalist, Outcome, Records, Refusal

GEMV = Candidate("gemv", (("n", 2),))


def final(fast_us: float) -> Outcome:
    return Outcome(
        (
            Finalist(Candidate("aten"), (), 10.0, 1.0, 1.0, 1.0, 1, unconditional=True),
            Finalist(GEMV, (), fast_us, 10.0 / fast_us, 1.0, 3.0, 1, unconditional=True),
        )
    )


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Records of one of the two_layers model's tasks, and of a task of another model."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    write_artifact("a.tuned", two_layers.contents())
    task = two_layers.tuning(b"").plan.tasks[0].key
    records = Records(tmp_path / "store" / "records.sqlite")
    records.add("k1", task, timing(3.0))
    records.add("k1", task, timing(2.0))
    records.add("k2", task, Refusal(GEMV, Rejected("wrong", "error 0.5")))
    records.add("race", task, final(4.0))
    records.add("k3", "0" * 24, timing(7.0))
    records.close()
    (tmp_path / "store" / "kernels" / "objects" / "ab").mkdir(parents=True)
    (tmp_path / "store" / "kernels" / "objects" / "ab" / "abc").write_bytes(b"code")
    return tmp_path / "store"


def records(*arguments: str, store: Path) -> int:
    return cli.run(["records", *arguments, "--records", str(store)])


def output(capsys: pytest.CaptureFixture[str]) -> str:
    return " ".join(capsys.readouterr().out.split())


def test_list_knows_tasks_by_key_and_with_an_artifact_by_name(store: Path, capsys):
    assert records("list", store=store) == 0
    out = output(capsys)
    assert "0" * 24 in out
    assert "2.50x" in out
    assert "not finished" in out
    assert records("list", "a.tuned", store=store) == 0
    out = output(capsys)
    assert "matmul 1x8x8 f32 + relu" in out
    assert "1 tasks; 1 of the artifacts' tasks are not here" in out
    assert records("list", "a.tuned", "--json", store=store) == 0
    (row,) = json.loads(capsys.readouterr().out)
    assert (row["label"], row["timings"], row["refusals"], row["best_us"]) == ("matmul 1x8x8 f32 + relu", 2, 1, 4.0)


def test_stats_count_rows_and_bytes(store: Path, capsys):
    assert records("stats", "--json", store=store) == 0
    stats = json.loads(capsys.readouterr().out)
    assert stats["kinds"] == {"timing": 3, "outcome": 1, "refusal": 1}
    assert (stats["tasks"], stats["superseded"], stats["kernels"], stats["kernels_bytes"]) == (2, 1, 1, 4)
    assert stats["database_bytes"] > 4096
    assert records("stats", store=store) == 0
    assert "3 timing, 1 outcome, 1 refusal" in output(capsys)


@pytest.mark.parametrize(
    ("options", "removed"),
    [
        (["--superseded"], 1),
        (["--task", "0" * 24], 1),
        (["--keep", "a.tuned"], 1),
        (["--keep", "a.tuned", "--superseded"], 2),
        (["--kernels"], 0),
    ],
)
def test_prune_removes_what_is_asked_and_nothing_in_a_dry_run(store: Path, capsys, options: list[str], removed: int):
    code = store / "kernels" / "objects" / "ab" / "abc"
    assert records("prune", *options, "--dry-run", store=store) == 0
    assert f"would remove {removed} of 5 rows" in output(capsys)
    assert code.exists()
    assert len(Records(store / "records.sqlite").numbers()) == 5
    assert records("prune", *options, store=store) == 0
    assert f"removed {removed} of 5 rows" in output(capsys)
    assert len(Records(store / "records.sqlite").numbers()) == 5 - removed
    assert code.exists() == ("--kernels" not in options)


def test_export_and_merge_carry_everything_once(store: Path, tmp_path: Path, capsys):
    assert records("export", "-o", "all.jsonl", store=store) == 0
    assert records("export", "-o", "all.jsonl.gz", store=store) == 0
    assert records("export", store=store) == 0
    plain = Path("all.jsonl").read_bytes()
    assert gzip.decompress(Path("all.jsonl.gz").read_bytes()) == plain
    assert capsys.readouterr().out.encode() == plain
    assert len(plain.splitlines()) == 5
    new = tmp_path / "new"
    database = str(store / "records.sqlite")
    named = {"all.jsonl": "all.jsonl", "all.jsonl.gz": "all.jsonl.gz", str(store): database, database: database}
    for number, (source, shown) in enumerate(named.items()):
        assert records("merge", source, store=new) == 0
        assert capsys.readouterr().out == f"{shown}: {0 if number else 5} new rows\n"
    assert list(Records(new / "records.sqlite").export()) == plain.splitlines(keepends=True)


@pytest.mark.parametrize("state", ["of an older version", "damaged", "in use"])
def test_what_is_merged_from_is_left_as_it_is(store: Path, tmp_path: Path, state: str):
    """It was brought up to date, or set aside as damaged."""
    source = store / "records.sqlite"
    if state == "of an older version":
        with closing(sqlite3.connect(source)) as connection:
            connection.execute("pragma user_version = 2")
            connection.commit()
    elif state == "damaged":
        code = source.read_bytes()
        source.write_bytes(code[:100] + b"\xff" * 900 + code[1000:])
    writer = Records(source) if state == "in use" else None
    if writer is not None:
        writer.add("k4", "0" * 24, timing(8.0))
    before = {path: path.read_bytes() for path in store.glob("records*") if path.suffix != ".sqlite-shm"}
    assert records("merge", str(store), store=tmp_path / "new") == 0
    assert {path: path.read_bytes() for path in before} == before
    assert not list(store.glob("*.damaged*"))
    merged = Records(tmp_path / "new" / "records.sqlite")
    assert len(merged.numbers()) == {"of an older version": 5, "damaged": 5, "in use": 6}[state]
    merged.close()
    if writer is not None:
        writer.close()


@pytest.mark.parametrize("change", ["a page", "a row"])
def test_a_damaged_source_is_named_as_it_was_given(store: Path, tmp_path: Path, caplog, change: str):
    """The warning named the copy in a temporary folder that it is read from."""
    source = store / "records.sqlite"
    if change == "a page":
        code = source.read_bytes()
        source.write_bytes(code[:100] + b"\xff" * 900 + code[1000:])
    else:
        with closing(sqlite3.connect(source)) as connection:
            connection.execute("update records set digest = 'none' where id = 1")
            connection.commit()
    assert records("merge", str(store), store=tmp_path / "new") == 0
    (said,) = (record.getMessage() for record in caplog.records)
    assert said.startswith(str(source))
    assert tempfile.gettempdir() not in said.replace(str(tmp_path), "")
    assert "aside" not in said


def test_the_cache_is_the_default_place(store: Path, capsys):
    assert cli.run(["records", "merge", str(store)]) == 0
    assert capsys.readouterr().out.endswith(": 5 new rows\n")
    assert cli.run(["records", "stats", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["tasks"] == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["list", "--records", "nowhere"], "there are no records"),
        (["stats", "--records", "nowhere"], "there are no records"),
        (["export", "--records", "nowhere"], "there are no records"),
        (["prune", "--superseded", "--records", "nowhere"], "there are no records"),
        (["prune", "--records", "store"], "say what to remove"),
        (["prune", "--task", "abc", "--records", "store"], "'abc' is no task of these records"),
        (["prune", "--keep", "none.tuned", "--records", "store"], "none.tuned does not exist"),
        (["merge", "none.jsonl", "--records", "store"], "none.jsonl: there are no records"),
        (["merge", "a.tuned", "--records", "store"], "a.tuned: line 1 is no record"),
        (["merge", "--records", "store"], "Missing argument"),
        (["list", "none.tuned", "--records", "store"], "none.tuned does not exist"),
        (["tidy"], "No such command"),
    ],
)
def test_what_cannot_be_is_said_and_changes_nothing(store: Path, capsys, arguments: list[str], message: str):
    assert cli.run(["records", *arguments]) == 2
    assert message in capsys.readouterr().err
    assert not Path("nowhere").exists()
    assert len(Records(store / "records.sqlite").numbers()) == 5


@pytest.mark.parametrize("name", ["list", "stats", "prune", "merge", "export"])
def test_every_subcommand_has_help(name: str, capsys):
    assert cli.run(["records", name, "--help"]) == 0
    assert len(capsys.readouterr().out.splitlines()) > 6


@pytest.mark.parametrize("name", ["records.sqlite", "model.tuned"])
def test_an_export_replaces_only_an_export(store: Path, tmp_path: Path, capsys, name: str):
    """Exported over their own database, the records were gone, and so was an artifact in that place."""
    place = store / name
    if name == "model.tuned":
        place.write_bytes(b"PK\x03\x04 and more")
    before = place.read_bytes()
    for packed in ("", ".gz"):
        target = store / f"{name}{packed}"
        if packed:
            target.write_bytes(before)
        assert records("export", "-o", str(target), store=store) == 2
        assert "is a file but not exported records" in capsys.readouterr().err
        assert target.read_bytes()[:16] == before[:16]  # opening a database moves its counters
    for _ in range(2):
        assert records("export", "-o", str(tmp_path / "again.jsonl.gz"), store=store) == 0
    assert len(gzip.decompress((tmp_path / "again.jsonl.gz").read_bytes()).splitlines()) > 1
