"""The benchmark's forms are what extract makes of its functions, and it runs on a CPU."""

from pathlib import Path

import msgspec
import pytest
import torch
from bench.footprints import told
from click.testing import CliRunner
from form_builder import random_inputs, run_results
from raw_programs import Function, raw_program
from reducing.operations import OPERATIONS, Operation
from reducing.shapes import LARGE, REGRET
from reducing.summary import summarise
from reductions import main

from tune_model.extract.regions.group import group
from tune_model.extract.rewrite import rewrite
from tune_model.pipeline.bench.result import BenchmarkResult
from tune_model.runtime.program import bind_form
from tune_model.tune.candidate import Candidate
from tune_model.tune.records.facts import Trail
from tune_model.tune.search.descent import descend

ROWS, COLUMNS = 7, 96


@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda operation: operation.name)
def test_forms_equal_extracts_and_compute_what_the_peers_do(operation: Operation):
    form = operation.form(ROWS, COLUMNS)
    inputs = {
        p.name: (torch.randn(5, COLUMNS, dtype=torch.bfloat16), ("rows", COLUMNS))
        for p in form.parameters
        if p.role == "activation"
    }
    weights = [(COLUMNS,)] * (len(form.parameters) - len(inputs))
    module = Function(operation.function, *weights, dtype=torch.bfloat16)
    (found,) = group(rewrite(raw_program(module, **inputs))).program.forms.values()
    assert bind_form(found, (ROWS,)) == form
    given = random_inputs(form)
    results = operation.function(*given)
    results = results if isinstance(results, tuple) else (results,)
    for got, wanted in zip(run_results(form, given), results, strict=True):
        torch.testing.assert_close(got, wanted, rtol=2e-2, atol=2e-2)


def test_rows_are_distinct_and_cover_what_was_asked():
    assert len({row.name for row in LARGE}) == len(LARGE)
    sizes = {(row.rows, row.columns) for row in LARGE}
    assert {(1, 4096), (32768, 8192), (16, 131072), (4, 262144)} <= sizes
    assert len({row.name for row in REGRET}) == len(REGRET) == 20


def table(name: str, ratio: float, **values) -> dict:
    fixed = {"shard": "rows", "row": name, "chain": False, "size_bytes": 1 << 20, "of_copy": 0.1, "over_eager": 1.0}
    return {**fixed, "ratio": ratio, "ratio_low": ratio - 0.1, "ratio_high": ratio + 0.1, **values}


def test_the_summary():
    assert summarise([]) == {}
    rows = [
        table("a", 1.0, size_bytes=1 << 30, of_copy=0.93),
        table("b", 4.0, size_bytes=1 << 30, of_copy=0.95),
        table("c", 2.0, chain=True, over_eager=3.0),
        {"shard": "rows", "row": "d", "failed": "RuntimeError: x"},
        {"shard": "regret", "row": "e", "regret": 0.02, "spread": 0.01, "asked": [10, 14], "timed": 100},
        {"shard": "regret", "row": "f", "regret": 0.01, "spread": 0.0, "asked": [8, 8], "timed": 100},
    ]
    found = summarise(rows)
    assert found["min_share_of_copy_bandwidth"] == 0.93
    assert found["geomean_vs_max_autotune"] == pytest.approx(2.0)
    assert found["worst_vs_max_autotune"] == pytest.approx(1.1)
    assert found["geomean_fused_vs_eager"] == pytest.approx(3.0)
    assert found["regret_max"] == 0.02
    assert found["measurements_share"] == pytest.approx(0.1)


def test_a_search_is_told_step_by_step():
    space = [(("block", b), ("warps", w)) for b in (1, 2, 4, 8) for w in (1, 2)]
    found = descend(space[0], space, lambda c: 20.0 - int(c[0][1]) + int(c[1][1]), lambda _configs: None)
    lines = list(told(Trail(Candidate("triton_rows"), found.footprints)))
    assert lines[0] == "triton_rows, descent 1 from block=1, warps=1: 20.00 us"
    assert lines[1] == "  20.00 us: neighbours warps=2 21.00 us, block=2 19.00 us; to block=2"
    assert lines[-1] == "  8 tried, start / best 1.538"


@pytest.mark.slow
def test_shards_on_a_cpu_and_again(tmp_path: Path):
    path = tmp_path / "small.json"
    arguments = ["--small", "--target", "cpu", "--effort", "quick", "--save", str(path), "--folder", str(tmp_path)]
    arguments += ["--only", "softmax 3x256", "--workers", "1"]
    done = CliRunner().invoke(main, arguments, catch_exceptions=False)
    assert done.exit_code == 0, done.output
    result = msgspec.json.decode(path.read_bytes(), type=BenchmarkResult)
    rows = {row["shard"]: row for row in result.rows}
    assert set(rows) == {"machine", "rows", "regret"}
    assert not [row for row in result.rows if "failed" in row], result.rows
    row = rows["rows"]
    assert row["ratio_low"] <= row["ratio"] <= row["ratio_high"]
    assert min(row["eager_us"], row["max_autotune_us"], row["ours_us"]) > 0
    assert rows["regret"]["regret"] >= 0
    assert result.summary["measurements_share"] > 0
    again = CliRunner().invoke(main, arguments, catch_exceptions=False)
    assert "tuned 1" not in again.output
    assert msgspec.json.decode(path.read_bytes(), type=BenchmarkResult).rows == result.rows
