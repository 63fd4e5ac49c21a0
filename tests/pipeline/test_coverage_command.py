"""`tune-model coverage`, and what a server's misses add to a workload."""

import json
from pathlib import Path

import msgspec
import pytest
import two_layers

from tune_model.extract.request import Request, TransformersSource
from tune_model.package.identity import identify
from tune_model.package.read import open_artifact
from tune_model.package.write import write_artifact
from tune_model.pipeline import cli
from tune_model.pipeline.config import ConfigError, LoadedConfig, load_config
from tune_model.pipeline.demand import OtherWorkloadError, asked_by_servers, sizes_to_add
from tune_model.runtime.coverage import Coverage, CoverageRow, ModelIdentity, Outcome, Tally

CONFIG = """
name: two_layers
model:
  source: torch
  factory: two_layers:model
  inputs: [{name: x, shape: [batch, 8], dtype: float32}]
task: forward
dtype: float32
workload: {forward: {batch: [1, 16]}}
target: cpu
"""

DECODER = """
name: tiny
model:
  source: transformers
  config: {model_type: llama, hidden_size: 64, max_position_embeddings: 4096}
task: causal-lm
dtype: float32
workload:
  max_length: 2048
  max_batch: 64
  prefill: {batch: [1], sequence: [512]}
  decode: {batch: [1, 8], context: [1024]}
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    write_artifact("a.tuned", two_layers.contents())
    (tmp_path / "a.yaml").write_text(CONFIG, encoding="utf-8")
    return tmp_path


TINY = identify(
    "tiny",
    Request(
        TransformersSource(config={"model_type": "llama", "hidden_size": 64, "max_position_embeddings": 4096}),
        "float32",
        "causal-lm",
        (),
    ),
)


def model_of(artifact: str) -> ModelIdentity:
    manifest = open_artifact(artifact).manifest
    return identify(manifest.name, manifest.request)


def save(path: Path, *rows: tuple[str, Outcome, int, dict[str, int]], model: ModelIdentity | None = None) -> Path:
    """Write coverage as a server would: (program, outcome, runs, sizes)."""
    coverage = Coverage(model)
    for program, outcome, runs, sizes in rows:
        row = CoverageRow(program, "f", "matmul linear", (1,), outcome, "", None, (), 2)
        tally = Tally((row,), program, tuple(sorted(sizes.items())))
        tally.runs = runs
        coverage.add(tally)
    coverage.save(path)
    return path


def test_its_own_grid_is_covered(folder: Path, capsys):
    assert cli.run(["coverage", "a.tuned", "--strict"]) == 0
    assert capsys.readouterr().out == "a.tuned: 2 sizes asked for, 0 not tuned\n"


def test_a_configuration_that_asks_for_more_fails_when_strict(folder: Path, capsys):
    arguments = ["coverage", "a.tuned", "--config", "a.yaml", "--set", "workload.forward.batch=[1,16,3,64]"]
    assert cli.run(arguments) == 0
    assert cli.run([*arguments, "--strict"]) == 4
    out = capsys.readouterr().out
    assert "batch=3" in out
    assert "forward batch=1" in out
    assert "4 sizes asked for, 2 not tuned" in out


def test_sizes_that_the_program_refuses_are_lacking(folder: Path, capsys):
    arguments = ["coverage", "a.tuned", "--config", "a.yaml", "--set", "workload.forward.batch=[65]", "--strict"]
    assert cli.run(arguments) == 4
    assert "batch is 65; the program takes 1 to 64" in " ".join(capsys.readouterr().out.split())


def test_misses_of_several_servers_add_up(folder: Path, capsys):
    first = save(folder / "1.json", ("forward", "near", 5, {"batch": 3}), ("forward", "exact", 9, {"batch": 1}))
    second = save(folder / "2.json", ("forward", "near", 6, {"batch": 3}))
    arguments = ["coverage", "a.tuned", "--misses", str(first), "--misses", str(second), "--json"]
    assert cli.run(arguments) == 0
    points = json.loads(capsys.readouterr().out)
    assert [(p["sizes"], p["runs"], p["near"], p["exact"]) for p in points] == [
        ({"batch": 3}, 11, 2, 0),
        ({"batch": 1}, 9, 0, 2),
    ]
    assert cli.run([*arguments, "--strict"]) == 4


def test_the_report_shows_misses(folder: Path, capsys):
    misses = save(folder / "1.json", ("forward", "near", 5, {"batch": 3}), ("forward", "exact", 9, {"batch": 1}))
    assert cli.run(["report", "a.tuned", "--misses", str(misses), "--format", "json", "-o", "-"]) == 0
    assert json.loads(capsys.readouterr().out)["missing"] == [
        {"phase": "forward", "point": "batch=3", "runs": 5, "near": 2, "plain": 0, "nearest": "forward batch=1"}
    ]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("dtype=bfloat16", '$.dtype is "bfloat16"; expected float32'),
        ("model.factory=other:model", "$.model is another model; expected the artifact's"),
        ("workload.forward.batch=[]", "non-empty"),
    ],
)
def test_a_configuration_of_another_model_is_refused(folder: Path, capsys, change: str, message: str):
    assert cli.run(["coverage", "a.tuned", "--config", "a.yaml", "--set", change]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--set", "dtype=float32"], "give one with --config"),
        (["--misses", "none.json"], "none.json: No such file"),
        (["--misses", "a.yaml"], "expected what coverage().save(path) writes"),
        (["--config", "none.yaml"], "there is no such file"),
    ],
)
def test_wrong_input_is_one_line(folder: Path, capsys, arguments: list[str], message: str):
    assert cli.run(["coverage", "a.tuned", *arguments]) == 2
    assert message in capsys.readouterr().err


# --------------------------------------------------------------------------------------------------------- add misses


@pytest.fixture
def decoder(tmp_path: Path) -> LoadedConfig:
    (tmp_path / "tiny.yaml").write_text(DECODER, encoding="utf-8")
    return load_config(str(tmp_path / "tiny.yaml"))


def grown(decoder: LoadedConfig, path: Path) -> LoadedConfig:
    _, overrides = sizes_to_add(decoder, [path])
    return load_config(str(decoder.folder / "tiny.yaml"), overrides)


def test_what_missed_is_added_and_what_a_neighbour_serves_is_not(decoder: LoadedConfig, tmp_path: Path):
    misses = save(
        tmp_path / "m.json",
        ("decode", "miss", 10, {"batch": 9, "context": 1024}),
        ("decode", "near", 90, {"batch": 2, "context": 1100}),
        ("decode", "near", 80, {"batch": 3, "context": 64}),
        ("decode", "near", 70, {"batch": 7, "context": 70}),
        ("decode", "exact", 99, {"batch": 8, "context": 1024}),
        ("prefill", "near", 40, {"batch": 1, "sequence": 600}),
        ("prefill", "near", 30, {"batch": 1, "sequence": 100}),
    )
    added, _ = sizes_to_add(decoder, [misses])
    assert [(a.phase, a.size, a.value, a.runs) for a in added] == [
        ("decode", "batch", 9, 10),  # ran plain operators, however near it is to 8
        ("decode", "batch", 2, 90),
        ("decode", "batch", 3, 80),
        ("decode", "context", 64, 80),
        ("prefill", "sequence", 100, 30),
    ]
    workload = grown(decoder, misses).config.workload
    assert workload.decode is not None
    assert workload.prefill is not None
    assert (workload.decode.batch, workload.decode.context) == ((1, 2, 3, 8, 9), (64, 1024))
    assert workload.prefill.sequence == (100, 512)


def test_many_lengths_become_few_grid_points(decoder: LoadedConfig, tmp_path: Path):
    rows = [("prefill", "near", 1, {"batch": 1, "sequence": n}) for n in range(1, 2000)]
    added, _ = sizes_to_add(decoder, [save(tmp_path / "m.json", *rows)])
    assert len(added) <= 22


def test_adding_twice_adds_nothing(decoder: LoadedConfig, tmp_path: Path):
    misses = save(tmp_path / "m.json", ("decode", "miss", 10, {"batch": 9, "context": 64}))
    again, overrides = sizes_to_add(grown(decoder, misses), [misses])
    assert (again, overrides) == ([], [])


def test_a_size_that_no_configuration_may_have_is_left_out(decoder: LoadedConfig, tmp_path: Path):
    misses = save(tmp_path / "m.json", ("decode", "near", 10, {"batch": 1, "context": 0}))
    assert sizes_to_add(decoder, [misses]) == ([], [])


def test_misses_of_another_model_are_refused(decoder: LoadedConfig, tmp_path: Path):
    misses = save(tmp_path / "m.json", ("forward", "miss", 10, {"batch": 9}))
    with pytest.raises(OtherWorkloadError, match="tells of 'forward' with"):
        sizes_to_add(decoder, [misses])


def test_misses_of_another_decoder_are_refused(decoder: LoadedConfig, tmp_path: Path):
    """Its phases and sizes have the same names, so nothing showed."""
    rows = [("decode", "miss", 10, {"batch": 9, "context": 64})]
    assert sizes_to_add(decoder, [save(tmp_path / "own.json", *rows, model=TINY)])[0]
    renamed = msgspec.structs.replace(TINY, name="tiny-v2")
    assert sizes_to_add(decoder, [save(tmp_path / "renamed.json", *rows, model=renamed)])[0]
    for field, value in (("source", "transformers llama 0123456789abcdef"), ("task", "forward")):
        other = msgspec.structs.replace(TINY, **{field: value})
        misses = save(tmp_path / "other.json", *rows, model=other)
        with pytest.raises(OtherWorkloadError) as caught:
            sizes_to_add(decoder, [tmp_path / "own.json", misses])
        assert str(caught.value).startswith(f"{misses}: $.model.{field} is {value!r}")
        assert f"expected {getattr(TINY, field)!r}" in str(caught.value)


def test_a_decoder_of_another_dtype_or_saved_by_another_version_is_the_same(decoder: LoadedConfig, tmp_path: Path):
    config = {"model_type": "llama", "hidden_size": 64, "max_position_embeddings": 4096}
    saved = {**config, "transformers_version": "5.9", "dtype": "bfloat16", "_name_or_path": "/models/tiny"}
    request = Request(TransformersSource(config=saved), "bfloat16", "causal-lm", (), max_length=64)
    assert identify("tiny", request) == TINY
    other = Request(TransformersSource(config={**config, "hidden_size": 65}), "float32", "causal-lm", ())
    assert identify("tiny", other) != TINY


@pytest.mark.parametrize("command", [["coverage", "a.tuned"], ["report", "a.tuned", "-o", "-"]])
def test_what_a_server_of_another_model_ran_is_refused(folder: Path, capsys, command: list[str]):
    rows = [("forward", "near", 5, {"batch": 3})]
    own = save(folder / "own.json", *rows, model=model_of("a.tuned"))
    assert cli.run([*command, "--misses", str(own)]) == 0
    write_artifact("b.tuned", two_layers.contents(name="other"))
    other = save(folder / "other.json", *rows, model=model_of("b.tuned"))
    capsys.readouterr()
    assert cli.run([*command, "--misses", str(own), "--misses", str(other)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "other.json: $.model.name is 'other'; expected 'two-layers', coverage of the model 'two-layers'" in line


def test_files_that_do_not_say_their_model_are_taken_with_a_warning(folder: Path, caplog):
    old = folder / "old.json"
    old.write_text('{"schema": 1, "points": [], "rows": [], "uncounted": 0}', encoding="utf-8")
    assert cli.run(["coverage", "a.tuned", "--misses", str(old)]) == 0
    (record,) = caplog.records
    assert record.getMessage().startswith(f"{old}: does not say which model it is of")


def test_parts_of_prompts_and_single_operators_are_no_other_model(decoder: LoadedConfig, tmp_path: Path):
    """One prompt longer than the longest tuned one, or one replayed operator, and a server's file was refused."""
    misses = save(
        tmp_path / "m.json",
        ("continuation", "miss", 10, {"batch": 1, "sequence": 100}),
        ("continuation", "miss", 9, {"batch": 1, "sequence": 500}),  # its attention is never tuned: 512 is near
        ("", "miss", 8, {}),
    )
    assert [(a.phase, a.size, a.value) for a in sizes_to_add(decoder, [misses])[0]] == [("prefill", "sequence", 100)]
    asked = [(one.phase, one.sizes["sequence"], one.runs) for one in asked_by_servers([misses], TINY)]
    assert asked == [("prefill", 100, 10), ("prefill", 500, 9)]


def test_a_value_beyond_the_models_limits_names_the_misses(decoder: LoadedConfig, tmp_path: Path):
    misses = save(tmp_path / "m.json", ("decode", "miss", 10, {"batch": 65, "context": 64}))
    with pytest.raises(ConfigError, match=r"add-misses .*m\.json.*decode\.batch.*at most 64"):
        grown(decoder, misses)
