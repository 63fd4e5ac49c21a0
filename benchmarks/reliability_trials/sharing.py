"""Eight tuners at once on one records database, one of them killed: all they reported is there, and the file is sound.

Their device answers at once, so that they write as fast as they can. Each notes what it has recorded only after it has.
"""

import shutil
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from random import Random
from typing import Any, Final

from bench.run import Bench, attempt

from reliability_trials.processes import new_mark, wait_for_none
from tune_model.tune.records.database import Records

__all__ = ["SHARD", "TUNERS", "run_sharing"]

SHARD: Final = "sharing"
TUNERS: Final = 8
_SCRIPT: Final = Path(__file__).with_name("shared_tuner.py")


def run_sharing(bench: Bench, repeats: int) -> None:
    """Write a row for each repeat."""
    for number in range(repeats):
        name = f"{TUNERS} tuners, {number + 1}"
        if bench.clock.is_over or not bench.wants(SHARD, name):
            continue
        row = attempt(bench, SHARD, name, lambda n=number: _share(bench, n))  # type: ignore[misc]
        if row is not None:
            bench.tell(f"  {name}: {row['reported']} reported, {row['lost']} lost, {row['integrity']}")


def _share(bench: Bench, number: int) -> Mapping[str, Any]:
    folder = bench.shop.folder.absolute() / f"sharing-{number}"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    dice = Random(f"sharing {number}")  # noqa: S311 (whom and when, can be repeated)
    environment = new_mark()
    notes = [folder / f"noted-{tuner}" for tuner in range(TUNERS)]
    command = [sys.executable, str(_SCRIPT), str(folder)]
    tuners = [
        subprocess.Popen([*command, str(tuner), str(note)], env=environment, stderr=subprocess.PIPE, text=True)
        for tuner, note in enumerate(notes)
    ]
    victim = dice.randrange(TUNERS)
    wanted = dice.randrange(5, 150)
    while _count(notes[victim]) < wanted and tuners[victim].poll() is None:
        time.sleep(0.001)
    tuners[victim].send_signal(signal.SIGKILL)
    errors = [tuner.communicate()[1] for tuner in tuners]
    codes = [tuner.returncode for tuner in tuners]
    expected = [-signal.SIGKILL if tuner == victim else 0 for tuner in range(TUNERS)]
    if codes != expected:
        raise AssertionError(f"exit codes {codes}: {next((e[-300:] for e in errors if e), '')}")
    orphans = wait_for_none(environment)
    place = folder / "records.sqlite"
    records = Records(place)
    stored = {row.key for row in records.rows()}
    damaged = records.moved_to is not None
    records.close()
    reported = {key for note in notes for key in note.read_text(encoding="ascii").split()}
    connection = sqlite3.connect(place)
    (integrity,) = connection.execute("pragma integrity_check").fetchone()
    connection.close()
    return {
        "reported": len(reported),
        "stored": len(stored),
        "lost": len(reported - stored),
        "integrity": "damaged" if damaged else integrity,
        "orphans": len(orphans),
    }


def _count(note: Path) -> int:
    return note.read_bytes().count(b"\n") if note.exists() else 0
