"""The reliability benchmark: its figures, that its trials can fail, and the quick ones in small."""

import os
import subprocess
import sys
import time
from itertools import compress
from pathlib import Path
from typing import Any

import msgspec
import pytest
from click.testing import CliRunner
from reliability import main
from reliability_trials.hostility import _moved
from reliability_trials.kills import _measured
from reliability_trials.processes import marked, new_mark, wait_for_none
from reliability_trials.summary import summarise

from tune_model.pipeline.bench.result import read_result
from tune_model.tune.candidate import Candidate
from tune_model.tune.events import CandidateDone
from tune_model.tune.measuring.interval import Ratio


def row(shard: str, name: str, **values: Any) -> dict[str, Any]:
    return {"shard": shard, "row": name, **values}


ROWS = [
    row("kills", "undisturbed", measured=300, reported=200, orphans=0),
    row("kills", "kill 1", lost=0, orphans=0),
    row("kills", "kill 2", lost=3, orphans=1),
    row("kills", "kill 3", failed="AssertionError"),
    row("kills", "completion", beyond_noise=2, undecided=5, orphans=0),
    row(
        "hostile",
        "good candidates",
        gains_compared=9,
        gains_moved=4,
        gains_compared_without=8,
        gains_moved_without=3,
        hostile_winners=1,
        orphans=2,
    ),
    row("hostile", "later timings", moved=1),
    row("hostile", "faults", expected="crash", found=["crash"]),
    row("hostile", "loops", expected="timeout", found=["crash", "timeout"]),
    row("hostile", "exits", expected="crash", found=[]),
    row("winners", "lucky but slow", chosen=1, won_finals=3),
    row("sharing", "8 tuners, 1", lost=4, orphans=0),
    row("fuzz-artifacts", "0 to 499", cases=500, unexpected=[[7, "IndexError"]]),
    row("fuzz-texts", "0 to 499", cases=500, unexpected=[]),
]


def test_the_summary_counts_what_went_wrong():
    assert summarise(ROWS) == {
        "kills": 2,
        "measurements_lost": 3 + 4,
        "choices_beyond_noise": 2,
        "choices_undecided": 5,
        "hostile_kinds": 3,
        "hostile_unreported": 2,
        "gains_compared": 9,
        "gains_moved": 4,
        "gains_compared_without": 8,
        "gains_moved_without": 3,
        "good_timings_moved": 1,
        "orphans": 1 + 2,
        "fuzzed_artifacts": 500,
        "fuzzed_texts": 500,
        "fuzz_unexpected": 1,
        "planted_finals_won": 3,
        "wrong_winners": 2,
        "failed_rows": 1,
    }
    assert set(summarise([]).values()) == {0}


def test_what_an_event_says_was_measured_is_found_in_the_records():
    candidate = Candidate("triton_gemv", (("block", 64), ("hint", "first"), ("packed", True)))
    event = msgspec.json.decode(msgspec.json.encode(CandidateDone("t", candidate, 1.25, 1.0, 2.0)))
    text = msgspec.json.encode(candidate, order="deterministic").decode()
    assert _measured(event) == ("t", text, 1.25)
    assert _measured({**event, "replayed": True}) is None
    assert _measured({"type": "task done"}) is None


def test_gains_move_when_their_intervals_are_apart():
    def gains(low: float, high: float) -> dict[tuple[str, Candidate], Ratio]:
        return {("t", Candidate("a")): Ratio((low + high) / 2, low, high)}

    assert _moved(gains(1.0, 1.2), gains(1.1, 1.3)) == (1, 0)
    assert _moved(gains(1.0, 1.2), gains(1.25, 1.3)) == (1, 0)  # within what a shared machine does
    assert _moved(gains(1.0, 1.2), gains(1.4, 1.5)) == (1, 1)
    assert _moved(gains(1.4, 1.5), gains(1.0, 1.2)) == (1, 1)
    assert _moved(gains(1.0, 1.2), {}) == (0, 0)


ORPHAN = """
import os, sys, time
os.fork() and os._exit(0)
os.setsid()
os.fork() and os._exit(0)
print(os.getpid(), flush=True)
time.sleep(600)
"""


def test_orphans_are_found_wherever_they_went():
    environment = new_mark()
    with subprocess.Popen([sys.executable, "-c", ORPHAN], env=environment, stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        orphan = int(parent.stdout.readline())
    deadline = time.monotonic() + 60
    while list(marked(environment)) != [orphan] and time.monotonic() < deadline:  # those before it are ending
        time.sleep(0.02)
    assert wait_for_none(environment, 0.3) == [orphan]
    os.kill(orphan, 9)
    assert wait_for_none(environment, 60.0) == []


@pytest.mark.parametrize("shard", ["winners", pytest.param("sharing", marks=pytest.mark.slow)])
def test_the_quick_trials_in_small(tmp_path: Path, shard: str):
    path = tmp_path / "result.json"
    arguments = ["--small", "--target", "cpu", "--shard", shard, "--save", str(path), "--folder", str(tmp_path / "f")]
    done = CliRunner().invoke(main, arguments, catch_exceptions=False)
    assert done.exit_code == 0, done.output
    result = read_result(path)
    assert {key for key, value in result.summary.items() if value} <= {"planted_finals_won"}
    if shard == "winners":
        found = [(r["won_finals"], r["found_out_as"]) for r in result.rows]
        # Where other processes kept a final or the guard from deciding, the extern stays, and nothing was found out.
        calm = [not r["disturbed"] for r in result.rows]
        assert list(compress(found, calm)) == list(compress([(1, ["wrong"]), (1, ["guard"])], calm))
    else:
        assert all(r["reported"] > 100 and r["integrity"] == "ok" for r in result.rows)
    again = CliRunner().invoke(main, arguments, catch_exceptions=False)
    assert again.exit_code == 0
    assert read_result(path).rows == result.rows
