"""The benchmark's forms are what extract makes of Llama-3-8B, and it runs on a CPU."""

from pathlib import Path

import msgspec
import pytest
from attending.forms import decode_form, prefill_form
from attending.shapes import DECODE, PREFILL, Decode
from attending.summary import summarise
from attention import main
from click.testing import CliRunner

from tune_model.extract.plan import extract
from tune_model.pipeline.bench.result import BenchmarkResult
from tune_model.pipeline.config import load_config
from tune_model.pipeline.request import make_request


def test_forms_are_llamas():
    loaded = load_config("llama-3-8b.yaml", ("model.config.num_hidden_layers=1",))
    tasks = extract(make_request(loaded.config, loaded.folder), check=False).plan.tasks
    found = {task.task.form for task in tasks if task.task.form.kind == "attention"}
    length = loaded.config.workload.max_length
    context = loaded.config.workload.decode.context[0]
    assert decode_form(16, (context, context), length) in found
    assert prefill_form(2048, cache=length) in found


def test_what_was_asked_is_covered():
    names = [row.name for row in (*DECODE, *PREFILL)]
    assert len(set(names)) == len(names)
    even = {(row.batch, row.low + 1) for row in DECODE if row.low == row.high}
    assert {(b, c) for b in (1, 16, 64) for c in (512, 1024, 8192, 32768)} <= even
    assert {row.facts["length"] for row in PREFILL if row.facts["kind"] == "plain"} == {512, 1024, 2048, 4096, 8192}
    assert [row.masked for row in DECODE if row.max_length == 1088] == [True]
    assert any(row.low < row.high for row in DECODE)


def test_bytes_in_use_are_those_of_the_rows():
    row = Decode(2, 10, 30, 64, heads=(4, 2, 16))
    most, least = row.used_bytes(2 * 31), row.used_bytes(2 * 11)
    assert most - least == 2 * 20 * 2 * 2 * 16 * 2


def decode_row(**values) -> dict:
    fixed = {"shard": "decode", "row": str(values), "batch": 16, "masked_us": None, "of_copy": 0.9, "used_bytes": 1e6}
    return {**fixed, "low": 1023, "high": 1023, "ours_us": 10.0, **values}


def test_the_summary():
    assert summarise([]) == {}
    rows = [
        decode_row(masked_us=60.0, over_masked=6.0, low=1024, high=1024),
        decode_row(low=8191, high=8191, of_copy=0.8, ours_us=10.0),
        decode_row(low=32767, high=32767, of_copy=0.85, ours_us=11.0),
        decode_row(low=2047, high=9000, of_copy=0.2, ours_us=10.5),
        {"shard": "prefill", "row": "p", "kind": "plain", "length": 2048, "ours_us": 130.0, "ratio": 1.01},
        {
            "shard": "prefill",
            "row": "q",
            "kind": "window",
            "length": 9,
            "ours_us": 10.0,
            "extern_us": 40.0,
            "ratio": None,
        },
    ]
    found = summarise(rows)
    assert found["decode_bw_share_8k"] == 0.8
    assert found["decode_b16_speedup_vs_masked"] == 6.0
    assert found["decode_cost_spread"] == pytest.approx(0.1)
    assert found["prefill_2048_us"] == 130.0
    assert found["prefill_vs_best_backend"] == 1.01
    assert found["other_masks_vs_eager"] == pytest.approx(4.0)


def test_shards_on_a_cpu_and_again(tmp_path: Path):
    path = tmp_path / "small.json"
    arguments = ["--small", "--target", "cpu", "--effort", "quick", "--save", str(path), "--folder", str(tmp_path)]
    done = CliRunner().invoke(main, [*arguments, "--workers", "1"], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    result = msgspec.json.decode(path.read_bytes(), type=BenchmarkResult)
    assert [row["row"] for row in result.rows if row["shard"] == "decode"]
    assert not [row for row in result.rows if "failed" in row], result.rows
    assert result.summary["other_masks_vs_eager"] > 0
    again = CliRunner().invoke(main, [*arguments, "--workers", "1"], catch_exceptions=False)
    assert "tuned 1" not in again.output
