import json
from pathlib import Path

import pytest
from reported import with_report
from two_layers import contents

from tune_model.package.read import open_artifact
from tune_model.package.write import write_artifact
from tune_model.pipeline import cli


@pytest.fixture
def artifact(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return write_artifact(tmp_path / "a.tuned", with_report(contents()))


def test_the_page_is_named_after_the_model_and_equals_the_one_inside(artifact: Path, capsys):
    assert cli.run(["report", str(artifact)]) == 0
    assert capsys.readouterr().err == "wrote two-layers.report.html\n"
    assert Path("two-layers.report.html").read_text(encoding="utf-8") == open_artifact(artifact).report()


@pytest.mark.parametrize(
    ("arguments", "start"),
    [
        (["-o", "r.md"], "# two-layers on "),
        (["-o", "r.json"], '{\n "name": "two-layers"'),
        (["-o", "r.txt"], "<!doctype html>"),
        (["-o", "r.txt", "--format", "md"], "# two-layers on "),
    ],
)
def test_the_format_follows_the_name_or_the_option(artifact: Path, arguments: list[str], start: str):
    assert cli.run(["report", str(artifact), *arguments]) == 0
    assert Path(arguments[1]).read_text(encoding="utf-8").startswith(start)


def test_json_on_standard_output_is_nothing_but_json(artifact: Path, capsys):
    assert cli.run(["report", str(artifact), "--format", "json", "-o", "-"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["totals"]["tasks"] == 2


def test_measured_steps_come_from_a_benchmark(artifact: Path, tmp_path: Path, capsys):
    row = {"point": "forward batch=16", "median_ms": 2.0, "low_ms": 1.9, "high_ms": 2.1}
    rows = [{**row, "name": "eager", "median_ms": 5.0}, {**row, "name": "tuned"}]
    texts = dict.fromkeys(("benchmark", "device", "date", "command"), "x")
    result = {**texts, "versions": {}, "rows": rows, "summary": {}}
    (tmp_path / "bench.json").write_text(json.dumps(result))
    assert cli.run(["report", str(artifact), "--bench", "bench.json", "--format", "json", "-o", "-"]) == 0
    points = {p["point"]: p["steps"] for p in json.loads(capsys.readouterr().out)["points"]}
    assert [s["name"] for s in points["batch=16"]] == ["tuned", "eager"]
    assert points["batch=1"] == []


NO_BENCHMARKS = {
    "of nothing": b"{}",
    "of other bytes": b'{"benchmark": "\xff"}',
    "of a thousand levels": b'{"rows": [{"a": ' + b"[" * 100_000,
}


@pytest.mark.parametrize("content", NO_BENCHMARKS.values(), ids=NO_BENCHMARKS)
def test_a_file_that_is_no_benchmark_is_one_line(artifact: Path, tmp_path: Path, capsys, content: bytes):
    (tmp_path / "bench.json").write_bytes(content)
    assert cli.run(["report", str(artifact), "--bench", "bench.json"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: bench.json: ")
    assert line.endswith("expected a benchmark result")


def test_a_device_is_no_benchmark(artifact: Path, capsys):
    """/dev/zero was read until there was no memory left."""
    assert cli.run(["report", str(artifact), "--bench", "/dev/zero"]) == 2
    assert "/dev/zero: is larger than 67108864 bytes" in capsys.readouterr().err


def test_an_artifact_that_is_none_is_one_line(tmp_path: Path, capsys):
    (tmp_path / "no.tuned").write_bytes(b"nothing")
    assert cli.run(["report", str(tmp_path / "no.tuned")]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1


@pytest.mark.parametrize("name", ["a.tuned", "records.sqlite", "my-model.yaml", "folder"])
def test_only_a_report_is_replaced(artifact: Path, tmp_path: Path, capsys, name: str):
    """With its own artifact for -o, a report took the artifact's place."""
    (tmp_path / "records.sqlite").write_bytes(b"SQLite format 3\0 and more")
    (tmp_path / "my-model.yaml").write_text("# A model\nname: x\n")
    (tmp_path / "folder").mkdir()
    place = tmp_path / name
    before = None if place.is_dir() else place.read_bytes()
    assert cli.run(["report", str(artifact), "-o", name]) == 2
    said = capsys.readouterr().err
    assert "is a folder; expected the name of a file" in said or "not a report as html; expected a report" in said
    assert before is None or place.read_bytes() == before
    assert not list(tmp_path.glob(".*partial*"))


def test_a_report_replaces_an_older_one_through_a_link_and_goes_to_a_device(artifact: Path, tmp_path: Path):
    (tmp_path / "real.html").write_text("<!doctype html> an older one")
    (tmp_path / "link.html").symlink_to("real.html")
    for name in ("link.html", "link.html", "/dev/null"):
        assert cli.run(["report", str(artifact), "-o", name]) == 0
    assert (tmp_path / "link.html").is_symlink()
    assert (tmp_path / "real.html").read_text(encoding="utf-8") == open_artifact(artifact).report()


def test_a_report_that_cannot_be_written_leaves_the_older_one(artifact: Path, tmp_path: Path, capsys):
    assert cli.run(["report", str(artifact), "-o", "nowhere/r.html"]) == 2
    assert "cannot be written: No such file or directory" in capsys.readouterr().err
