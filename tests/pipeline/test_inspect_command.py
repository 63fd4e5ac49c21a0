"""`tune-model inspect --footprints`: how one task's race went."""

import json
from pathlib import Path

import msgspec
import pytest
import two_layers

from tune_model.package.write import write_artifact
from tune_model.pipeline import cli
from tune_model.tune.candidate import Candidate
from tune_model.tune.choice import WholeStep
from tune_model.tune.records.facts import Trail
from tune_model.tune.search.descent import Footprint, Tried

START, FASTER = (("unroll", 1),), (("unroll", 2),)


@pytest.fixture
def artifact(tmp_path: Path) -> str:
    tuning = two_layers.tuning(two_layers.compiled())
    step = Footprint(0, Tried(START, 4.0), "neighbours", (Tried(FASTER, 3.0),), FASTER)
    first, *rest = tuning.choices
    first = msgspec.structs.replace(first, trails=(Trail(Candidate("cpp_small"), (step,)),))
    tuning = msgspec.structs.replace(tuning, choices=(first, *rest))
    return str(write_artifact(tmp_path / "a.tuned", two_layers.contents(tuning=tuning)))


def shown(capsys: pytest.CaptureFixture[str]) -> str:
    return " ".join(capsys.readouterr().out.split())


def test_a_climb_is_shown_step_by_step(artifact: str, capsys):
    assert cli.run(["inspect", artifact, "--footprints", "matmul 1x8"]) == 0
    out = shown(capsys)
    assert "matmul 1x8x8 f32 + relu" in out
    assert "cpp_small(unroll=1)" in out
    assert "unroll 1 -> 2" in out
    assert "1 neighbours" in out
    assert "rejected: 1 unsupported" in out


def test_memory_and_whole_steps_are_said(tmp_path: Path, capsys):
    step = WholeStep("forward", (("batch", 1),), 4.75, 9.25, 1.91, 1.99)
    tuning = msgspec.structs.replace(two_layers.tuning(two_layers.compiled()), steps=(step,))
    assert cli.run(["inspect", str(write_artifact(tmp_path / "a.tuned", two_layers.contents(tuning=tuning)))]) == 0
    out = shown(capsys)
    assert "served: weights 576 B, workspace 1.02 kB; together 1.6 kB" in out
    told = "forward batch=1: the whole step 4.75 us, with torch's operators 9.25 us, 1.95x (1.91 to 1.99)"
    assert told in out


def test_times_that_were_disturbed_have_no_share(tmp_path: Path, capsys):
    tuning = two_layers.tuning(two_layers.compiled())
    first, second = tuning.choices
    busy = msgspec.structs.replace(second, median_us=9e4, baseline_us=9e4, status="disturbed")
    tuning = msgspec.structs.replace(tuning, choices=(first, busy))
    path = str(write_artifact(tmp_path / "a.tuned", two_layers.contents(tuning=tuning)))
    assert cli.run(["inspect", path]) == 0
    out = shown(capsys)
    assert "100.0%" in out
    assert "1 tasks keep the library because other processes disturbed their times; tune again with --recheck" in out


def test_a_list_is_shown_in_the_order_timed(artifact: str, capsys):
    assert cli.run(["inspect", artifact, "--footprints", "16X8"]) == 0
    out = shown(capsys)
    assert "raced from a list, not climbed" in out
    assert out.index("│ aten │") < out.index("│ cpp_small(unroll=8) │")


def test_a_key_is_as_good_and_json_has_all(artifact: str, capsys):
    key = two_layers.tuning(b"").plan.tasks[0].key
    assert cli.run(["inspect", artifact, "--footprints", key[:10], "--json"]) == 0
    task = json.loads(capsys.readouterr().out)
    assert task["key"] == key
    assert task["footprints"][0]["moved"] == "unroll 1 -> 2"


@pytest.mark.parametrize(("text", "message"), [("matmul", "means 2 tasks"), ("conv", "means no task")])
def test_a_text_that_means_no_one_task_lists_them(artifact: str, capsys, text: str, message: str):
    assert cli.run(["inspect", artifact, "--footprints", text]) == 2
    err = capsys.readouterr().err
    assert message in err
    assert "matmul 16x8x8 f32 + relu" in err
