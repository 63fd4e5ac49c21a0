"""The command stopped on the way by its budget and by Ctrl-C: a valid artifact, the right exit code, and it goes on."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import stacked

from tune_model.package.read import open_artifact

RUN = "import sys; from tune_model.pipeline.cli import main; main(sys.argv[1:])"
CONFIG = """\
name: stacked
model:
  source: torch
  factory: stacked:Stacked
  inputs:
    - {name: x, shape: [batch, 64], dtype: float32}
task: forward
dtype: float32
workload:
  forward: {batch: [1, 4]}
target: cpu
search: {effort: quick}
"""


class Command:
    """`tune-model tune` on the stack, in a folder that keeps its records."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "stacked.yaml").write_text(CONFIG)

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        places = [str(Path(stacked.__file__).parent), *sys.path]
        command = [sys.executable, "-c", RUN, "tune", "stacked.yaml", "--records", "records", "--json", *arguments]
        return subprocess.Popen(
            command,
            cwd=self.folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(places)},
            start_new_session=True,
        )

    def run(self, *arguments: str) -> tuple[int, list[dict[str, object]], str]:
        tune = self.start(*arguments)
        out, errors = tune.communicate(timeout=560)
        return tune.returncode, [json.loads(line) for line in out.splitlines()], errors

    def statuses(self) -> set[str]:
        records = open_artifact(self.folder / "stacked.tuned").records()
        return {record.status for record in records if hasattr(record, "status")}


@pytest.fixture(scope="module")
def command(tmp_path_factory: pytest.TempPathFactory) -> Command:
    return Command(tmp_path_factory.mktemp("stopping"))


def spend(command: Command, budget_s: float) -> float:
    """Run with a budget that does not suffice; returns the seconds that it took."""
    code, events, errors = command.run("--budget", f"{budget_s:g}s")
    assert code == 3, errors
    last = events[-1]
    assert (last["type"], last["stopped"]) == ("tune finished", "budget")
    assert "not searched" in command.statuses()
    return float(str(last["seconds"]))


def test_a_spent_budget_is_exit_code_3_in_time(command: Command):
    """Starting the processes alone takes longer. tests/tune/test_budget.py has the end to the second, without them."""
    assert spend(command, 2.0) < 30.0


@pytest.mark.slow
def test_a_budget_ends_within_a_fifth_of_itself(tmp_path: Path):
    """On an otherwise idle machine."""
    assert spend(Command(tmp_path), 10.0) < 1.2 * 10.0


def test_ctrl_c_is_exit_code_130_with_a_valid_artifact(command: Command):
    tune = command.start()
    assert tune.stdout is not None
    seen = 0
    while seen < 3:
        line = tune.stdout.readline()
        assert line, "the tune ended early"
        event = json.loads(line)
        seen += event["type"] == "candidate done" and not event.get("replayed", False)
    os.killpg(tune.pid, signal.SIGINT)
    out, errors = tune.communicate(timeout=120)
    assert tune.returncode == 130, errors
    assert json.loads(out.splitlines()[-1])["stopped"] == "interrupted"
    assert "not searched" in command.statuses()


@pytest.mark.timeout(600)  # a whole tune, and what the machine does besides
def test_running_it_again_finishes_the_job(command: Command):
    code, events, errors = command.run()
    assert code == 0, errors
    assert events[-1]["stopped"] == ""
    assert any(event.get("replayed") for event in events)
    assert command.statuses() <= {"tuned", "no gain", "layout", "disturbed"}
    before = (command.folder / "stacked.tuned").read_bytes()
    code, events, errors = command.run()
    assert (code, events[-1]["builds"], events[-1]["measured"]) == (0, 0, 0), errors
    assert (command.folder / "stacked.tuned").read_bytes() == before
