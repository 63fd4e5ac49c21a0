import json
from pathlib import Path

import msgspec
import pytest
import two_layers
from noisy_tuning import ROWS, Weather, noisy_tuning

from tune_model.package.write import write_artifact
from tune_model.pipeline import cli


@pytest.fixture
def artifacts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    weathers = {"old": Weather(0), "again": Weather(1), "slower": Weather(2, slower=dict.fromkeys(ROWS, 1.05))}
    for name, weather in weathers.items():
        write_artifact(f"{name}.tuned", two_layers.contents(tuning=noisy_tuning(weather)))


@pytest.mark.usefixtures("artifacts")
def test_the_gate(capsys):
    assert cli.run(["diff", "old.tuned", "again.tuned", "--fail-if-slower", "3%"]) == 0
    assert cli.run(["diff", "old.tuned", "slower.tuned", "--fail-if-slower", "30%"]) == 0
    assert cli.run(["diff", "old.tuned", "slower.tuned"]) == 0
    assert capsys.readouterr().err == ""
    assert cli.run(["diff", "old.tuned", "slower.tuned", "--fail-if-slower", "3%"]) == 5
    assert "fails --fail-if-slower 3.00%: the weighted time of all tasks is slower by " in capsys.readouterr().err


@pytest.mark.usefixtures("artifacts")
def test_json_keeps_standard_output_clean(capsys):
    assert cli.run(["diff", "old.tuned", "slower.tuned", "--fail-if-slower", "3%", "--json"]) == 5
    diff = json.loads(capsys.readouterr().out)
    assert len(diff["tasks"]) == len(ROWS)
    assert diff["same_machine"]


@pytest.mark.usefixtures("artifacts")
def test_people_see_what_changed(capsys):
    assert cli.run(["diff", "old.tuned", "slower.tuned", "--all"]) == 0
    out = capsys.readouterr().out
    assert "matmul 64x8x8 f32 + relu" in out
    assert "weighted time" in out
    assert "corrected for drift" in out


@pytest.mark.usefixtures("artifacts")
@pytest.mark.parametrize("limit", ["3", "three", "-3%", "%", "0.03"])
def test_a_limit_is_a_percentage(capsys, limit: str):
    assert cli.run(["diff", "old.tuned", "slower.tuned", f"--fail-if-slower={limit}"]) == 2
    assert "expected a percentage such as 3%" in capsys.readouterr().err


def test_tasks_that_could_not_be_compared_are_not_listed_as_changed(tmp_path: Path, capsys, monkeypatch):
    """An artifact compared with itself listed every disturbed task under `tasks that changed`."""
    monkeypatch.chdir(tmp_path)
    for name, seed in (("a.tuned", 0), ("b.tuned", 1)):
        tuning = noisy_tuning(Weather(seed))
        first = msgspec.structs.replace(tuning.choices[0], status="disturbed")
        tuning = msgspec.structs.replace(tuning, choices=(first, *tuning.choices[1:]))
        write_artifact(name, two_layers.contents(tuning=tuning))
    assert cli.run(["diff", "a.tuned", "a.tuned", "--fail-if-slower", "0%"]) == 0
    assert "16 tasks in both, 16 without a change" in capsys.readouterr().out
    assert cli.run(["diff", "a.tuned", "b.tuned"]) == 0
    out = capsys.readouterr().out
    assert "tasks that changed" not in out
    assert "1 tasks were disturbed or not timed" in out
    assert f"{len(ROWS)} tasks in both, {len(ROWS) - 1} without a change" in out
    assert cli.run(["diff", "a.tuned", "b.tuned", "--all"]) == 0
    assert "not timed" in capsys.readouterr().out
