"""Every architecture in a process of its own: one that crashes or hangs costs its own row."""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import msgspec
import yaml
from bench.run import Bench, attempt

from architectures.architecture import Architecture
from tune_model.runtime.errors import TuneModelError

__all__ = ["run_architectures"]

LIMIT_S: Final = 240.0


class TrialError(TuneModelError):
    """The process did not end as it should."""


def run_architectures(bench: Bench, shard: str, architectures: Sequence[Architecture]) -> None:
    """Try every architecture of a shard that has no row yet."""
    for one in bench.missing(shard, architectures):
        if bench.clock.is_over:
            return
        row = attempt(bench, shard, one.name, lambda one=one: _try(bench, one))
        if row is not None:
            said = row.get("says") or "; ".join(row.get("wrong", ()))
            bench.tell(f"  {one.name}: {row['status']}{said and f': {said}'}, {row['seconds']} s")


def _try(bench: Bench, one: Architecture) -> dict[str, Any]:
    folder = bench.shop.folder.absolute()
    folder.mkdir(parents=True, exist_ok=True)
    config = folder / f"{re.sub('[^a-z0-9]+', '-', one.name.lower()).strip('-')}.yaml"
    config.write_text(yaml.safe_dump(dict(one.document), sort_keys=False), encoding="utf-8")
    found = folder / "trial.json"
    found.unlink(missing_ok=True)
    _run([sys.executable, "-m", "architectures.trial", str(config), str(folder)])
    row = {"known": one.known, "task": one.task, **msgspec.json.decode(found.read_bytes())}
    if row["status"] == "differs":
        row["failed"] = "; ".join(row["wrong"])[:300]
    return row


def _run(command: Sequence[str]) -> None:
    """Run a process; what it started ends with it.

    Raises:
        TrialError: It ended with an error, or not at all.
    """
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[1]), *sys.path])}
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment, start_new_session=True
    )
    try:
        printed, _ = process.communicate(timeout=LIMIT_S)
    except subprocess.TimeoutExpired as error:
        raise TrialError(f"not done after {LIMIT_S:.0f} s") from error
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
    if process.returncode:
        lines = printed.strip().splitlines() or ["nothing printed"]
        raise TrialError(f"exit code {process.returncode}: {lines[-1]}")
