"""One tune of a small model, killed at random moments, then finished: nothing that was measured may be lost.

The same command is run again after every SIGKILL. What it reported as measured must be in the records afterwards, and
no process may be left. In the end the choices are compared with those of a tune that nobody disturbed.
"""

import json
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from random import Random
from typing import Any, Final

import msgspec
from bench.run import Bench, TimeOverError, attempt

from reliability_trials.compare import compare_choices
from reliability_trials.processes import new_mark, wait_for_none
from tune_model.tune.records.database import Records, Timing
from tune_model.tune.target import CudaTarget

__all__ = ["KILLS", "SHARD", "run_kills"]

SHARD: Final = "kills"
KILLS: Final = 20

_MODULE: Final = "import sys; from tune_model.pipeline.cli import main; main(sys.argv[1:])"
_SEED: Final = 7
_START_S: Final = 120.0


class _Tune:
    """The command, in a folder of records of its own."""

    def __init__(self, bench: Bench, name: str) -> None:
        self.folder = bench.shop.folder.absolute() / f"kills-{name}"
        self.folder.mkdir(parents=True, exist_ok=True)
        self.output = self.folder / "model.tuned"
        self.spec = "cuda" if isinstance(bench.shop.target, CudaTarget) else "cpu"

    def start(self, environment: dict[str, str]) -> "subprocess.Popen[str]":
        """Begin or go on."""
        overrides = (
            f"target={self.spec}",
            "search.effort=quick",
            "workload.prefill.sequence=[16,64]",
            "workload.decode.batch=[1,4]",
        )
        options = [part for text in overrides for part in ("--set", text)]
        records = str(self.folder / "records")
        command = [sys.executable, "-c", _MODULE, "tune", "tiny-llama.yaml", *options, "--records", records]
        command += ["-o", str(self.output), "--json"]
        return subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment, start_new_session=True
        )

    def stored(self) -> set[tuple[str, str, float]]:
        """Return every time in the records."""
        place = self.folder / "records" / "records.sqlite"
        if not place.exists():
            return set()
        records = Records(place)
        try:
            if records.moved_to is not None:
                raise AssertionError(f"the records were damaged: {records.moved_to}")
            return {
                (row.task, _text(row.body.candidate), row.body.median_us)
                for row in records.rows()
                if isinstance(row.body, Timing)
            }
        finally:
            records.close()


def _text(candidate: Any) -> str:
    return msgspec.json.encode(candidate, order="deterministic").decode()


def _measured(event: dict[str, Any]) -> tuple[str, str, float] | None:
    """Return what an event says was measured now."""
    if event["type"] != "candidate done" or event.get("replayed") or event.get("rejected"):
        return None
    candidate = event["candidate"]
    config = candidate.get("config", [])
    text = json.dumps({"family": candidate["family"], "config": config}, separators=(",", ":"))
    decoded = msgspec.json.decode(text, type=_Candidate)
    return event["task"], _text(decoded), event["median_us"]


class _Candidate(msgspec.Struct, frozen=True):
    family: str
    config: tuple[tuple[str, int | float | str | bool], ...] = ()


def run_kills(bench: Bench, kills: int) -> None:
    """Measure the rows that are missing, in their order: each goes on where the one before was killed."""
    names = ["undisturbed", *(f"kill {number + 1}" for number in range(kills)), "completion"]
    if bench.ledger.row(SHARD, names[0]) is None or bench.again:
        for name in ("undisturbed", "killed"):
            shutil.rmtree(_Tune(bench, name).folder)
    for number, name in enumerate(names):
        if bench.clock.is_over:
            bench.tell("time is over; run again to continue")
            return
        if not bench.wants(SHARD, name):
            continue
        step: Callable[[], Mapping[str, Any]]
        if name == "undisturbed":
            step = lambda: _undisturbed(bench)  # noqa: E731 (one of three)
        elif name == "completion":
            step = lambda: _completion(bench)  # noqa: E731
        else:
            step = lambda n=number: _kill(bench, n, kills)  # type: ignore[misc]  # noqa: E731
        row = attempt(bench, SHARD, name, step)
        if row is None:
            return
        bench.tell(f"  {name}: {', '.join(f'{k} {v}' for k, v in row.items() if k not in {'shard', 'row'})}")


def _finish(tune: _Tune) -> tuple[dict[str, Any], list[int], float]:
    """Run to the end; returns the last event with `reported`, the number of times told, orphans, and seconds."""
    environment = new_mark()
    began = time.monotonic()
    process = tune.start(environment)
    out, errors = process.communicate()
    if process.returncode != 0:
        raise AssertionError(f"exit code {process.returncode}: {errors[-300:]}")
    lines = out.splitlines()
    last: dict[str, Any] = json.loads(lines[-1])
    last["reported"] = sum(_measured_line(line) is not None for line in lines)
    return last, wait_for_none(environment), time.monotonic() - began


def _undisturbed(bench: Bench) -> Mapping[str, Any]:
    tune = _Tune(bench, "undisturbed")
    last, orphans, seconds = _finish(tune)
    counts = {name: last[name] for name in ("measured", "reported", "builds")}
    return {"seconds": seconds, **counts, "orphans": len(orphans)}


def _completion(bench: Bench) -> Mapping[str, Any]:
    tune = _Tune(bench, "killed")
    before = len(tune.stored())
    last, orphans, seconds = _finish(tune)
    again, _, _ = _finish(tune)
    if (again["builds"], again["measured"]) != (0, 0):
        raise AssertionError(f"a second tune built {again['builds']} and measured {again['measured']}")
    compared = compare_choices(_Tune(bench, "undisturbed").output, tune.output, bench.shop.target)
    return {
        "seconds": seconds,
        "kept": before,
        "measured": last["measured"],
        "orphans": len(orphans),
        **compared,
    }


def _kill(bench: Bench, number: int, kills: int) -> Mapping[str, Any]:
    """Start, wait for a random number of new measurements and a moment more, and kill."""
    tune = _Tune(bench, "killed")
    dice = Random(f"kill {_SEED} {number}")  # noqa: S311 (which moment, can be repeated)
    wanted = _until(bench, number, kills, dice)
    environment = new_mark()
    before = tune.stored()
    began = time.monotonic()
    process = tune.start(environment)
    seen = _follow(process, wanted, dice)
    process.send_signal(signal.SIGKILL)
    finished = process.wait() == 0
    seen += [found for found in map(_measured_line, process.stdout or ()) if found is not None]
    orphans = wait_for_none(environment)
    stored = tune.stored()
    if finished:
        raise AssertionError("the tune ended before it was killed")
    return {
        "after_s": time.monotonic() - began,
        "reported": len(seen),
        "kept": len(stored),
        "lost": len([found for found in seen if found not in stored]) + len(before - stored),
        "orphans": len(orphans),
    }


def _until(bench: Bench, number: int, kills: int, dice: Random) -> int:
    """Choose after how many new times to kill, so that about as many are left for the kills to come."""
    done = bench.finished(SHARD)
    total = next(row["reported"] for row in done if row["row"] == "undisturbed")
    rest = max(total - sum(row["reported"] for row in done if row["row"].startswith("kill ")), 0)
    return dice.randrange(max(min(2 * rest // (kills - number + 2), 6 * rest // 10), 1))


def _follow(process: "subprocess.Popen[str]", wanted: int, dice: Random) -> list[tuple[str, str, float]]:
    """Read events until so many new measurements were reported, then wait a moment more."""
    seen: list[tuple[str, str, float]] = []
    if wanted == 0:
        time.sleep(dice.uniform(0.0, 10.0))  # while it starts
        return seen
    deadline = time.monotonic() + _START_S
    assert process.stdout is not None  # noqa: S101 (it is a pipe)
    for line in process.stdout:
        found = _measured_line(line)
        if found is not None:
            seen.append(found)
        if len(seen) >= wanted:
            break
        if time.monotonic() > deadline + wanted:
            raise TimeOverError
    time.sleep(dice.uniform(0.0, 0.5))
    return seen


def _measured_line(line: str) -> tuple[str, str, float] | None:
    try:
        return _measured(json.loads(line))
    except ValueError:  # cut off
        return None
