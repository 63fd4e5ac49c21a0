"""The main job on a CPU, on the command line: tune, verify, and tune again without building or measuring anything."""

import json
import os
import subprocess
import sys
from pathlib import Path

from tune_model.pipeline.bench.result import read_result

RUN = "import sys; from tune_model.pipeline.cli import main; main(sys.argv[1:])"
SMALL = (
    "--set",
    "target=cpu",
    "--set",
    "search.effort=quick",
    "--set",
    "workload.prefill.sequence=[16]",
    "--set",
    "workload.decode.batch=[2]",
)


def tune_model(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", RUN, *(str(a) for a in arguments)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=300, env=environment)


def tune(config: Path, records: Path, output: Path, *more: object) -> dict[str, object]:
    """Tune; returns the last event."""
    done = tune_model("tune", config, *SMALL, "--records", records, "-o", output, "--json", *more)
    assert done.returncode == 0, done.stderr
    events = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert events[-1]["type"] == "tune finished"
    return events[-1]


def test_a_tuned_model_verifies_and_a_second_tune_repeats_it_for_nothing(repository: Path, tmp_path: Path):
    config = repository / "configs" / "tiny-llama.yaml"
    cost = tmp_path / "cost.json"
    first = tune(config, tmp_path / "records", tmp_path / "first.tuned", "--save", cost)
    assert first["builds"]
    assert first["measured"]
    saved = read_result(cost)
    assert (saved.summary["builds"], saved.summary["measurements"]) == (first["builds"], first["measured"])
    assert len(saved.rows) == saved.summary["tasks"]
    assert saved.summary["complete"] == 1
    assert saved.command.endswith("--json --save cost.json")
    verified = tune_model("verify", tmp_path / "first.tuned")
    assert verified.returncode == 0, verified.stdout + verified.stderr
    assert "the original's first choice" in verified.stdout + verified.stderr
    second = tune(config, tmp_path / "records", tmp_path / "second.tuned")
    assert (second["builds"], second["measured"]) == (0, 0)
    assert (tmp_path / "second.tuned").read_bytes() == (tmp_path / "first.tuned").read_bytes()
