"""Cases for testing the judge of the fuzzers; importable in its process."""

import os
import time
from collections.abc import Callable
from pathlib import Path

from reliability_trials.judge import Limits

LIMITS = Limits(seconds=1.0, megabytes=100.0, on_cpu=True)
HOARD: list[bytearray] = []


def prepare(folder: Path) -> Path:
    return folder


def make(folder: Path, case: int) -> tuple[str, Callable[[], bool]]:
    def read() -> bool:
        match case:
            case 1:
                raise ValueError("no such number\nand more")
            case 2:
                os.abort()
            case 3:
                began = time.process_time()
                while time.process_time() - began < LIMITS.seconds:
                    pass
            case 4:
                bytearray(os.urandom(1)) * (200 << 20)
            case 5:
                os._exit(0)
            case 6:
                raise SystemExit("bye")
        return case % 2 == 0

    return "odd" if case % 2 else "even", read
