"""Signals during a tune: nothing measured is lost, and no process is left."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import slow_tune
from tuning_fakes import alive

from tune_model.tune.records.database import Records


def start(folder: Path) -> subprocess.Popen[str]:
    support = str(Path(slow_tune.__file__).parent)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([support, *sys.path])}
    command = [sys.executable, slow_tune.__file__, str(folder)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment, start_new_session=True)


def children(pid: int) -> list[int]:
    found = subprocess.run(["ps", "-o", "pid=", "--ppid", str(pid)], capture_output=True, text=True, check=False).stdout
    return [int(line) for line in found.split()]


def wait_for_candidates(tune: subprocess.Popen[str], count: int) -> None:
    assert tune.stdout is not None
    while count:
        line = tune.stdout.readline()
        assert line, "the tune ended early"
        count -= line.strip() == "CandidateDone"


def stored(folder: Path) -> int:
    records = Records(folder / "records.sqlite")
    try:
        assert records.moved_to is None
        return sum(1 for _ in records.export())
    finally:
        records.close()


@pytest.fixture(scope="module")
def tunes(tmp_path_factory: pytest.TempPathFactory) -> dict[signal.Signals, tuple[subprocess.Popen[str], Path]]:
    """A tune for each signal, started together: starting is what takes long."""
    folders = {number: tmp_path_factory.mktemp(number.name) for number in (signal.SIGINT, signal.SIGKILL)}
    return {number: (start(folder), folder) for number, folder in folders.items()}


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL], ids=["ctrl-c", "kill"])
def test_what_was_measured_is_kept_and_nothing_is_left_running(
    tunes: dict[signal.Signals, tuple[subprocess.Popen[str], Path]], number: signal.Signals
):
    tune, folder = tunes[number]
    wait_for_candidates(tune, 4)
    workers = children(tune.pid)
    assert workers
    os.killpg(tune.pid, number)
    rest = tune.communicate(timeout=120)[0]
    deadline = time.monotonic() + 60
    while any(alive(pid) for pid in workers) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not [pid for pid in workers if alive(pid)]
    if number == signal.SIGINT:
        assert tune.returncode == 0
        assert "stopped=interrupted" in rest
        assert stored(folder) == 4 + rest.split().count("CandidateDone")
    else:
        assert tune.returncode == -signal.SIGKILL
        assert stored(folder) >= 4
