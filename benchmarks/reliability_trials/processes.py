"""Processes that a trial started: found again by a mark in their environment, wherever they went."""

import os
import time
import uuid
from pathlib import Path
from typing import Final

__all__ = ["MARK", "marked", "new_mark", "wait_for_none"]

MARK: Final = "TUNE_MODEL_TRIAL"
"""A variable that every process below the trial's inherits, daemons too."""


def new_mark() -> dict[str, str]:
    """Return an environment with a mark that no other process has."""
    return {**os.environ, MARK: uuid.uuid4().hex}


def marked(environment: dict[str, str]) -> list[int]:
    """Return the running processes with an environment's mark."""
    mark = f"{MARK}={environment[MARK]}".encode()
    found: list[int] = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            variables = (entry / "environ").read_bytes()
            state = (entry / "stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()[0]
        except OSError:
            continue  # it has ended, or is somebody else's
        if mark in variables.split(b"\0") and state not in {"Z", "X"}:
            found.append(int(entry.name))
    return found


def wait_for_none(environment: dict[str, str], seconds: float = 10.0) -> list[int]:
    """Return the processes that still run after a while: orphans."""
    deadline = time.monotonic() + seconds
    while (left := marked(environment)) and time.monotonic() < deadline:
        time.sleep(0.1)
    return left
