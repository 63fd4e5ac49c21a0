"""README's figures are those of the committed results, and benchmarks/README.md lists what is committed."""

import importlib
import math
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from sources import tracked_files

from tune_model.pipeline.bench.result import BenchmarkResult, read_result

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results"
README = (ROOT / "README.md").read_text(encoding="utf-8")
SECTION = README[README.index("\n## Results") : README.index("\n## Use")]
PROSE = " ".join(SECTION.split())
PAGE = (ROOT / "benchmarks" / "README.md").read_text(encoding="utf-8")
SUMMARIES = {
    "attention": "attending",
    "matmul": "matmuls",
    "models": "architectures",
    "reductions": "reducing",
    "reliability": "reliability_trials",
    "serving": "deployment",
}
"""The folder of each script whose summary follows from its rows."""


SUMMARISED = [path for path in sorted(RESULTS.glob("*.json")) if read_result(path).benchmark in SUMMARIES]


def result(name: str) -> BenchmarkResult:
    return read_result(RESULTS / f"{name}.json")


def rows_of(name: str, shard: str) -> list[dict[str, Any]]:
    return [row for row in result(name).rows if row["shard"] == shard]


def tables(text: str) -> list[list[list[str]]]:
    """Every table: its head, then its rows, as cells."""
    found = re.findall(r"(?m)^(\|.*\|)\n\|[-|]+\|\n((?:\|.*\|\n)+)", text)
    return [
        [[c.strip() for c in line.strip("|").split("|")] for line in (head, *body.split("\n")[:-1])]
        for head, body in found
    ]


def assert_says(text: str, value: float) -> None:
    """A printed figure is the value, rounded to the digits printed."""
    (figure,) = re.findall(r"-?\d+(?:\.\d+)?", text)
    decimals = len(figure.partition(".")[2])
    assert abs(float(figure) - value) <= 0.5 * 10**-decimals * (1 + 1e-9), f"{text} is printed for {value}"


def geomean(values: Iterable[float]) -> float:
    logs = [math.log(value) for value in values]
    return math.exp(sum(logs) / len(logs))


def test_whole_models_on_a_gpu():
    (head, *body), *_ = tables(SECTION)
    peers = {
        "tune-model": "",
        "`torch.compile` max-autotune": "_max_autotune",
        "eager + CUDA graph": "_eager_graph",
        "eager": "_eager",
    }
    points = {
        "decode, batch 1, context 1024": "decode_b1_ms",
        "decode, batch 16, context 1024": "decode_b16_ms",
        "prefill, 2048 tokens": "prefill_2048_ms",
    }
    found = result("llama-3-8b.h200")
    assert [row[0] for row in body] == list(points)
    assert head[1:] == list(peers)
    assert {row["context"] for row in found.rows if row["phase"] == "decode"} == {1024}
    for name, *cells in body:
        for peer, cell in zip(peers.values(), cells, strict=True):
            assert cell.endswith((" ms", " ms**"))
            assert_says(cell, found.summary[points[name] + peer])
    assert found.summary["prefill_2048_ms_eager_graph"] > found.summary["prefill_2048_ms_eager"]
    assert "In prefill eager's CUDA graph took longer than eager itself" in PROSE


def test_matmuls():
    _, (head, *body), *_ = tables(SECTION)
    assert head[1:] == ["shapes", "faster", "cuBLAS stays", "slower", "speedup"]
    rows = rows_of("matmul.h200", "rows")
    assert not [row for row in rows if "failed" in row]
    counted = 0
    for name, shapes, faster, stays, slower, speedup in body:
        low, high = map(int, re.findall(r"\d+", name))
        band = [row for row in rows if low <= row["m"] <= high]
        counted += len(band)
        kept = [row for row in band if row["status"] == "no gain"]
        assert int(shapes) == len(band)
        assert int(faster) == sum(row["ratio_low"] > 1 for row in band)
        assert int(stays) == len(kept)
        assert int(slower) == sum(row["ratio_high"] < 1 for row in band)
        assert_says(speedup, geomean(row["ratio"] for row in band))
    assert counted == len(rows)


def test_who_wins_with_many_rows():
    said = re.search(r"(\d+) winners of the last line are algorithms of the same library", PROSE)
    assert said is not None
    many = [row for row in rows_of("matmul.h200", "rows") if row["m"] >= 257]
    assert int(said[1]) == sum(row["winner"].startswith("cublaslt(") for row in many)


def test_epilogues_are_fused_where_that_is_faster():
    rows = rows_of("matmul.h200", "epilogues")
    assert {row["verdict"] for row in rows} == {"fused", "kept unfused"}
    assert all(row["gain"] > 1 for row in rows if row["verdict"] == "fused")


def test_sentences_about_matmuls():
    peers = rows_of("matmul.h200", "max-autotune")
    (slower,) = [row for row in peers if row["ratio_high"] < 1]
    said = re.search(
        r"Of (\d+) shapes of Llama-3-8B ours is faster than max-autotune's kernel on (\d+), slower on 1 "
        r"\(by ([\d.]+) %\)",
        PROSE,
    )
    assert said is not None
    assert (int(said[1]), int(said[2])) == (len(peers), sum(row["ratio_low"] > 1 for row in peers))
    assert_says(said[3], 100 * (1 / slower["ratio"] - 1))
    regret = rows_of("matmul.h200", "regret")
    said = re.search(
        r"On (\d+) shapes every kernel of the whole space .* at most ([\d.]+) % slower than the best\. "
        r".*? were tuned in (\d+) s",
        PROSE,
    )
    assert said is not None
    assert int(said[1]) == len(regret)
    assert_says(said[2], 100 * max(row["regret"] for row in regret))
    assert_says(said[3], result("matmul.h200").summary["tune_s_llama_8b"])


def test_sentences_about_reductions():
    summary, rows = result("reductions.h200").summary, rows_of("reductions.h200", "rows")
    said = re.search(
        r"over (\d+) rows of .*? ([\d.]+) times as fast as .*? the slowest row ([\d.]+) % behind it\), the chains "
        r"([\d.]+) times as fast as eager\. Rows that move more than 64 MB reach (\d+) % or more",
        PROSE,
    )
    assert said is not None
    assert int(said[1]) == len(rows)
    assert_says(said[2], summary["geomean_vs_max_autotune"])
    assert_says(said[3], 100 * (1 / min(row["ratio"] for row in rows) - 1))
    assert_says(said[4], summary["geomean_fused_vs_eager"])
    assert_says(said[5], 100 * summary["min_share_of_copy_bandwidth"])
    regret = sorted((row["regret"], row["row"].split()[0]) for row in rows_of("reductions.h200", "regret"))
    said = re.search(
        r"On (\d+) reductions every kernel .*? asked for (\d+) % of them: (\d+) choices were at most ([\d.]+) % slower "
        r"than the best, a (\w+) of 2 us ([\d.]+) % and an (\w+) of 4 us ([\d.]+) %",
        PROSE,
    )
    assert said is not None
    assert (int(said[1]), int(said[3])) == (len(regret), len(regret) - 2)
    assert_says(said[2], 100 * summary["measurements_share"])
    assert_says(said[4], 100 * regret[-3][0])
    assert [(said[5], said[6]), (said[7], said[8])] == [(name, f"{100 * value:.1f}") for value, name in regret[-2:]]


def test_sentences_about_attention():
    rows = {row["row"]: row for row in (*rows_of("attention.h200", "decode"), *rows_of("attention.h200", "prefill"))}
    said = re.search(
        r"8192 tokens and more .*? at (\d+) % or more of a copy's bandwidth .*? with batch 16 and 64, and at (\d+) % "
        r"\(8192\) and (\d+) % \(32768\) with batch 1\. Batch 16 at 1024 tokens takes ([\d.]+) us; "
        r".*? takes (\d+) us\.",
        PROSE,
    )
    assert said is not None
    many = [r["of_copy"] for name, r in rows.items() if re.search(r"batch (16|64) context (8191|16383|32767) ", name)]
    assert len(many) == 5
    assert_says(said[1], 100 * min(many))
    assert_says(said[2], 100 * rows["decode batch 1 context 8191 of 32832"]["of_copy"])
    assert_says(said[3], 100 * rows["decode batch 1 context 32767 of 32832"]["of_copy"])
    full = rows["decode batch 16 context 1024 of 1088"]
    assert_says(said[4], full["ours_us"])
    assert_says(said[5], full["masked_us"])
    assert "For prompts of 512 to 8192 tokens cuDNN stays" in PROSE
    plain = [row for name, row in rows.items() if re.fullmatch(r"prefill \d+", name)]
    assert {row["best"] for row in plain} == {"cudnn"}
    assert all(row["winner"] == "aten" or "cudnn" in row["winner"] for row in plain)


def test_sentences_about_tuning():
    summary = result("llama-3-8b-tuning.h200").summary
    said = re.search(
        r"Tuning took (\d+) s .*?: (\d+) tasks, (\d+) kernels built, (\d+) measurements, "
        r"(\d+) tasks? where the library",
        PROSE,
    )
    assert said is not None
    for figure, key in zip(said.groups(), ("tune_s", "tasks", "builds", "measurements", "no_gain"), strict=True):
        assert_says(figure, summary[key])


def test_the_demo_on_a_cpu():
    *_, (head, *body) = tables(SECTION)
    assert head == ["batch x tokens", "tune-model", "`torch.compile`, freezing", "eager"]
    summary = result("quickstart.cpu").summary
    assert len(body) == sum(key.endswith("_ms") for key in summary)
    for point, *cells in body:
        batch, tokens = point.split(" x ")
        for peer, cell in zip(("", "_compile_freezing", "_eager"), cells, strict=True):
            assert_says(cell, summary[f"forward_b{batch}_s{tokens}_ms{peer}"])


def test_sentences_about_encoders_and_the_server():
    found = result("serving.cpu").summary
    encoders = rows_of("serving.cpu", "encoders")
    said = re.search(
        r"geometric mean ([\d.]+)x over freezing, at least ([\d.]+)x in each of the (\d+) rows, "
        r"and ([\d.]+)x over eager",
        PROSE,
    )
    assert said is not None
    assert_says(said[1], found["encoder_geomean_vs_freezing"])
    assert_says(said[2], min(row["compile_freezing_ratio"] for row in encoders))
    assert int(said[3]) == len(encoders)
    assert_says(said[4], found["encoder_geomean_vs_eager"])
    (server,) = rows_of("serving.cpu", "server")
    said = re.search(r"(\d+) streaming clients for a minute .* wrong token: (\d+) requests, (\d+) tokens", PROSE)
    assert said is not None
    assert (f"{said[1]} clients", int(said[2]), int(said[3])) == (server["row"], server["requests"], server["tokens"])
    assert (server["errors"], server["wrong"], server["seconds"]) == (0, 0, 60)


@pytest.mark.parametrize("name", re.findall(r"\(benchmarks/results/([\w.-]+)\.json\)", SECTION))
def test_dates_and_machines_are_the_results(name: str):
    """Of the paragraph that links the result, or of the one before it on the same machine."""
    found = result(name)
    assert found.device.split(",")[0].removeprefix("NVIDIA ") in PROSE
    assert found.date in PROSE
    assert f"torch {'.'.join(found.versions['torch'].split('.')[:2])}" in PROSE


@pytest.mark.parametrize("path", SUMMARISED, ids=lambda path: path.name)
def test_summaries_follow_from_their_rows(path: Path):
    found = read_result(path)
    summarise = importlib.import_module(f"{SUMMARIES[found.benchmark]}.summary").summarise
    made = summarise(found.rows)
    assert found.summary.keys() == made.keys()
    assert found.summary == pytest.approx(made, rel=1e-5)


def test_the_list_of_results_is_the_folder():
    listed = set(re.findall(r"(?m)^\| `([\w.-]+\.json)` \|", PAGE))
    committed = {path.name for path in tracked_files() if path.parent == RESULTS and path.suffix == ".json"}
    assert committed
    assert listed == committed


def test_every_script_is_described_and_has_results_on_a_gpu_or_is_said_to_have_none():
    scripts = {path.stem for path in tracked_files() if path.parent == ROOT / "benchmarks" and path.suffix == ".py"}
    measured = {read_result(path).benchmark for path in RESULTS.glob("*.json")}
    assert measured >= scripts
    for script in scripts:
        assert f"`benchmarks/{script}.py" in PAGE or f"## `{script}.py`" in PAGE, script
    (missing,) = re.findall(r"No figures of a GPU have been committed yet of\s+(.*?)\.\n", PAGE, re.DOTALL)
    on_gpu = {read_result(path).benchmark for path in RESULTS.glob("*.h200.json")}
    assert set(re.findall(r"`benchmarks/(\w+)\.py`", missing)) == scripts - on_gpu - {"models", "regions"}


def test_every_figure_of_a_summary_is_explained():
    for path in SUMMARISED:
        found = read_result(path)
        text = PAGE.partition(f"\n## `{found.benchmark}.py`")[2].partition("\n## ")[0]
        assert [key for key in found.summary if f"`{key}`" not in text] == [], path.name
