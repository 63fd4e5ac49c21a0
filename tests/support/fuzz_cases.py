"""Cases for testing the judge of the fuzzers; importable in its process."""

import os
import time
from collections.abc import Callable
from pathlib import Path

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
                time.sleep(2.2)
            case 4:
                bytearray(os.urandom(1)) * (600 << 20)
            case 5:
                os._exit(0)
            case 6:
                raise SystemExit("bye")
        return case % 2 == 0

    return "odd" if case % 2 else "even", read
