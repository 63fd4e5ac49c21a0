"""Signals during a tune: nothing measured is lost, and no process is left."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

import pytest
import slow_tune
from tuning_fakes import alive

from tune_model.tune.records.database import Records

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGKILL)


def start(folder: Path) -> subprocess.Popen[str]:
    support = str(Path(slow_tune.__file__).parent)
    (folder / "temporary").mkdir()
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([support, *sys.path]),
        "TMPDIR": str(folder / "temporary"),
    }
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


class Ended(NamedTuple):
    """A tune that was sent a signal, and its workers."""

    tune: subprocess.Popen[str]
    folder: Path
    workers: list[int]


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> dict[signal.Signals, Ended]:
    """A tune for each signal, started together (starting is what takes long) and stopped before any is over."""
    folders = {number: tmp_path_factory.mktemp(number.name) for number in SIGNALS}
    tunes = {number: start(folder) for number, folder in folders.items()}
    found = {}
    for number, tune in tunes.items():
        wait_for_candidates(tune, 4)
        found[number] = Ended(tune, folders[number], children(tune.pid))
        os.killpg(tune.pid, number)
    return found


@pytest.mark.parametrize("number", SIGNALS, ids=["ctrl-c", "terminate", "hang up", "kill"])
def test_what_was_measured_is_kept_and_nothing_is_left_running(
    ended: dict[signal.Signals, Ended], number: signal.Signals
):
    """SIGTERM, how batch systems and containers end what takes too long, threw the artifact away."""
    tune, folder, workers = ended[number]
    assert workers
    rest = tune.communicate(timeout=120)[0]
    deadline = time.monotonic() + 60
    while any(alive(pid) for pid in workers) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not [pid for pid in workers if alive(pid)]
    assert not list((folder / "temporary").iterdir())  # a killed tune left its workers' files there for ever
    if number != signal.SIGKILL:
        assert tune.returncode == 0
        assert "stopped=interrupted" in rest
        assert stored(folder) == int(rest.rsplit("measured=", 1)[1]) >= 4
    else:
        assert tune.returncode == -signal.SIGKILL
        assert stored(folder) >= 4
