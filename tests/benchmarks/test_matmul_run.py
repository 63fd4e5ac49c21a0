"""The whole benchmark on tiny shapes, and that it goes on where it stopped."""

import gzip
import json
from pathlib import Path

import msgspec
import pytest
import recorded_gpu
import torch
from bench.arena import Arena, Contender, WrongResultError, extern
from bench.ledger import Clock, Ledger, OtherMachineError, head_here
from bench.plans import plan_of, task_of
from bench.races import Race, Races, races_path
from bench.run import Bench, TimeOverError, attempt
from bench.tuned import Shop, Tuned
from click.testing import CliRunner
from matmul import main
from matmuls.epilogues import layers, measure, runs_apart
from matmuls.forms import linear_form
from matmuls.shapes import FEW

from tune_model.pipeline.bench.result import BenchmarkResult, read_result, write_result
from tune_model.runtime.program import Form
from tune_model.tune.candidate import Candidate
from tune_model.tune.choice import Choice, Tuning
from tune_model.tune.families import aten
from tune_model.tune.machine.probe import probe_target

CPU = torch.device("cpu")


def ledger(path: Path) -> Ledger:
    return Ledger(path, head_here("matmul", CPU, "command"), lambda rows: {"rows": float(len(rows))})


def bench(path: Path, **options) -> Bench:
    return Bench(ledger(path), Clock(None), Shop(probe_target("cpu"), path.parent), lambda _line: None, **options)


def test_rows_are_saved_at_once_and_found_again(tmp_path: Path):
    path = tmp_path / "results" / "a.json"
    first = ledger(path)
    first.record("rows", "1x2x3", {"us": 1.23456789, "ratio": 1.0})
    first.record("rows", "2x2x3", {"us": 2.0})
    first.record("rows", "1x2x3", {"us": 3.0})
    again = ledger(path)
    assert again.row("rows", "1x2x3") == {"shard": "rows", "row": "1x2x3", "us": 3.0}
    assert again.row("regret", "1x2x3") is None
    assert read_result(path).summary == {"rows": 2.0}


def test_figures_of_other_versions_are_not_mixed(tmp_path: Path):
    path = tmp_path / "a.json"
    ledger(path).record("rows", "x", {})
    old = read_result(path)
    write_result(path, msgspec.structs.replace(old, versions={**old.versions, "torch": "1.0"}))
    with pytest.raises(OtherMachineError, match=r"\$\.versions"):
        ledger(path)


def test_parts_measured_side_by_side_become_one_file(tmp_path: Path):
    paths = [tmp_path / f"{number}.json" for number in (1, 2)]
    for number, path in enumerate(paths):
        run = bench(path, part=(number, 2))
        for row in run.missing("rows", FEW):
            run.ledger.record("rows", row.name, {"part": number})
    whole = ledger(tmp_path / "whole.json")
    for path in paths:
        whole.absorb(path)
    assert {row["row"] for row in read_result(whole.path).rows} == {row.name for row in FEW}
    assert {row["part"] for row in whole.rows} == {0, 1}
    write_result(paths[0], msgspec.structs.replace(read_result(paths[0]), device="another"))
    with pytest.raises(OtherMachineError, match=r"\$\.device"):
        whole.absorb(paths[0])


def test_parts_of_another_machine_come_together_here(tmp_path: Path):
    paths = [tmp_path / f"{number}.json" for number in (1, 2)]
    for number, path in enumerate(paths, start=1):
        ledger(path).record("machine", "limits", {"copy_tbps": 4.2 + number})
        day = f"2026-11-0{number}"
        there = {"device": "elsewhere", "date": day, "command": f"command {number}"}
        write_result(path, msgspec.structs.replace(read_result(path), **there))
    whole = tmp_path / "whole.json"
    merge = ["--save", str(whole), *(part for path in paths for part in ("--merge", str(path)))]
    for _ in range(2):
        assert CliRunner().invoke(main, merge).exit_code == 0
        found = read_result(whole)
        assert (found.device, found.date) == ("elsewhere", "2026-11-02")
        assert found.command == "command 1 && command 2"
        assert [row["copy_tbps"] for row in found.rows] == [6.2]
    ledger(tmp_path / "here.json").record("machine", "limits", {})
    result = CliRunner().invoke(main, [*merge, "--merge", str(tmp_path / "here.json")])
    assert result.exit_code == 1
    assert "$.device is" in result.output
    assert read_result(whole) == found
    for misused in (merge[2:], [*merge, "--shard", "rows"], [*merge, "--only", "1x"]):
        assert CliRunner().invoke(main, misused).exit_code == 2


@pytest.mark.parametrize("content", [b"", b"no gzip", gzip.compress(b""), gzip.compress(b"{}\n")])
def test_what_cannot_be_merged_changes_nothing(tmp_path: Path, content: bytes):
    whole, part = tmp_path / "whole.json", tmp_path / "part.json"
    ledger(whole).record("rows", "a", {"us": 1.0})
    before = whole.read_bytes()
    ledger(part).record("rows", "b", {"us": 2.0})
    races_path(part).write_bytes(content)
    result = CliRunner().invoke(main, ["--save", str(whole), "--merge", str(part)])
    assert (result.exit_code, result.exception is None or isinstance(result.exception, SystemExit)) == (1, True)
    assert "expected the races of a benchmark" in result.output
    assert whole.read_bytes() == before
    other = tmp_path / "other.json"
    write_result(other, msgspec.structs.replace(read_result(part), benchmark="reductions"))
    for pair in ((whole, other), (other, part)):
        result = CliRunner().invoke(main, ["--save", str(pair[0]), "--merge", str(pair[1])])
        assert "$.benchmark is" in result.output
    assert whole.read_bytes() == before


def test_a_failure_does_not_replace_what_was_measured(tmp_path: Path):
    whole, part = ledger(tmp_path / "whole.json"), ledger(tmp_path / "part.json")
    whole.record("rows", "a", {"us": 1.0})
    part.record("rows", "a", {"failed": "no memory"})
    part.record("rows", "b", {"failed": "no memory"})
    whole.absorb(part.path)
    assert [("failed" in row, row["row"]) for row in read_result(whole.path).rows] == [(False, "a"), (True, "b")]


def test_races_run_side_by_side_become_one_file(tmp_path: Path):
    whole = Races(races_path(tmp_path / "whole.json"), ledger(tmp_path / "whole.json").head, "policy")
    for number in (1, 2):
        path = tmp_path / f"{number}.json"
        part = Races(races_path(path), ledger(path).head)
        part.put(f"row {number}", Race("key", f"row {number}", "matmul", 1.0, {}))
        part.put("both", Race(f"of {number}", "both", "matmul", 1.0, {}))
        whole.absorb(races_path(path))
    header, found = recorded_gpu.read(whole.path)
    assert header.policy == "policy"
    assert [(race.label, race.task) for race in found] == [("both", "of 2"), ("row 1", "key"), ("row 2", "key")]
    other = msgspec.structs.replace(ledger(tmp_path / "x.json").head, device="another")
    with pytest.raises(OtherMachineError, match="another"):
        Races(whole.path, other)


@pytest.mark.parametrize("part", ["0/2", "3/2", "2", "a/b", "/"])
def test_a_part_is_one_of_so_many(part: str):
    result = CliRunner().invoke(main, ["--part", part, "--small", "--target", "cpu"])
    assert result.exit_code == 2
    assert "expected I/N" in result.output


def test_a_row_that_failed_is_tried_again_last(tmp_path: Path):
    run = bench(tmp_path / "a.json")

    def fail() -> dict[str, object]:
        raise ValueError("no such instruction\nand a long dump")

    assert attempt(run, "rows", FEW[0].name, fail) is None
    assert run.ledger.rows[0]["failed"] == "ValueError: no such instruction"
    attempt(run, "rows", FEW[1].name, lambda: {"us": 1.0})
    assert run.missing("rows", FEW[:3]) == [FEW[2], FEW[0]]
    assert run._replace(again=True).missing("rows", FEW[:3]) == [FEW[1], FEW[2], FEW[0]]
    assert run._replace(only=(FEW[2].name,)).missing("rows", FEW[:3]) == [FEW[2]]


def test_a_row_without_enough_time_leaves_no_trace(tmp_path: Path):
    run = bench(tmp_path / "a.json")

    def late() -> dict[str, object]:
        raise TimeOverError

    assert attempt(run, "regret", "x", late) is None
    assert run.ledger.rows == []


def test_the_clock_runs_out():
    now = [100.0]
    clock = Clock(5.0, lambda: now[0])
    assert (clock.left_s, clock.is_over) == (5.0, False)
    now[0] = 107.0
    assert (clock.left_s, clock.spent_s, clock.is_over) == (0.0, 7.0, True)
    assert Clock(None).left_s is None


def test_a_contender_that_computes_something_else_is_not_timed():
    target = probe_target("cpu")
    form = linear_form(4, 32, 16)
    wrong = Contender("wrong", lambda setting: lambda number: (setting.sets[number][0] @ setting.sets[0][1].T + 0.1,))
    right = Contender("right", lambda setting: lambda number: (setting.sets[number][0] @ setting.sets[0][1].T,))
    arena = Arena(target)
    timed = arena.meet(form, [extern(form, target), right], seed=1, budget_s=0.01)
    assert len(timed["right"].us) == len(timed["extern"].us) >= 3  # fewer rounds where others use the machine
    assert 0 < timed["right"].median_us < 1e6
    with pytest.raises(WrongResultError, match=r"wrong has a relative error of 0\.\d+; allowed"):
        arena.meet(form, [extern(form, target), wrong], seed=1, budget_s=0.01)


def untuned(*forms: Form) -> Tuned:
    """The choices of a tuner that found nothing better than ATen."""
    target = probe_target("cpu")
    choices = {}
    for form in forms:
        built = aten.FAMILY.build(task_of(form), (), target)
        choices[form] = Choice("key", Candidate("aten"), built.kernel, 1.0, 1.0, 1.0, 1.0, (), (), "no gain")
    plan = plan_of(forms)
    return Tuned(Tuning(plan, target, tuple(choices.values()), {}, 0, 0, 0.0), 0.0, choices)


@pytest.mark.parametrize("layer", layers((5,), scale=64), ids=lambda layer: layer.name)
def test_the_linear_and_the_rest_in_two_kernels_are_right_too(layer):
    row = measure(Arena(probe_target("cpu")), layer, untuned(layer.fused, layer.linear, layer.tail))
    assert row["verdict"] == "kept unfused"
    assert row["unfused"] == "aten, then aten"
    assert row["gain_low"] <= row["gain"] <= row["gain_high"]


def test_what_counts_as_fused():
    assert runs_apart(Candidate("aten"))
    assert runs_apart(Candidate("triton_epilogue", (("block", 1024), ("num_warps", 4))))
    assert runs_apart(Candidate("cublaslt", (("layout", "plain"), ("id", 66))))
    assert not runs_apart(Candidate("triton_epilogue", (("block", 0), ("num_warps", 0))))
    assert not runs_apart(Candidate("triton_split_k", (("split_k", 2),)))


def test_shards_on_a_cpu_and_again(tmp_path: Path):
    path = tmp_path / "small.json"
    arguments = ["--small", "--target", "cpu", "--effort", "quick", "--save", str(path), "--folder", str(tmp_path)]
    # Sixteen rows of bfloat16 have no candidate that needs a compiler.
    arguments += ["--only", "16x64x96", "--workers", "1", "--shard", "rows", "--shard", "regret"]
    done = CliRunner().invoke(main, arguments, catch_exceptions=False)
    assert done.exit_code == 0, done.output
    result = msgspec.json.decode(path.read_bytes(), type=BenchmarkResult)
    rows = {row["shard"]: row for row in result.rows}
    assert set(rows) == {"machine", "rows", "regret"}
    assert not [row for row in result.rows if "failed" in row]
    table = rows["rows"]
    assert table["ratio_low"] <= table["ratio"] <= table["ratio_high"]
    assert table["ours_us"] > 0
    assert table["roofline_us"] > 0
    assert rows["regret"]["regret"] >= 0
    assert {"geomean_m_le_16", "worst_vs_extern", "regret_max"} <= set(result.summary)
    header, (race,) = recorded_gpu.read(races_path(path))
    assert header.versions == result.versions
    assert race.label == "16x64x96"
    known = race.best_us()
    assert len(race.raced()) == rows["regret"]["candidates"]
    assert len(known) == rows["regret"]["timed"]
    assert min(known.values()) > 0
    assert sum(found.final is not None for found in race.raced().values()) >= 1
    again = CliRunner().invoke(main, arguments, catch_exceptions=False)
    assert "tuned 1" not in again.output
    assert json.loads(path.read_bytes())["rows"] == json.loads(msgspec.json.encode(result))["rows"]
