import json
from pathlib import Path

import pytest
from two_layers import contents

from tune_model.package.read import open_artifact
from tune_model.package.write import write_artifact
from tune_model.pipeline import cli
from tune_model.pipeline.report.inside import with_report


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


def test_a_file_that_is_no_benchmark_is_one_line(artifact: Path, tmp_path: Path, capsys):
    (tmp_path / "bench.json").write_text("{}")
    assert cli.run(["report", str(artifact), "--bench", "bench.json"]) == 2
    assert capsys.readouterr().err.startswith("error: bench.json: ")


def test_an_artifact_that_is_none_is_one_line(tmp_path: Path, capsys):
    (tmp_path / "no.tuned").write_bytes(b"nothing")
    assert cli.run(["report", str(tmp_path / "no.tuned")]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1
