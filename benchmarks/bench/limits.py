"""What the device's memory can do at most, measured in the same run: the ceiling of everything that only moves data."""

from collections.abc import Callable
from typing import Final

import torch

from bench.arena import Arena
from tune_model.tune.measuring.interval import percentile
from tune_model.tune.measuring.policy import Rung

__all__ = ["measure_copy", "median_us"]

_COPY_BYTES: Final = {"cuda": 2 << 30, "cpu": 64 << 20}


def measure_copy(arena: Arena) -> float:
    """Return terabytes per second, read plus written, of a large copy within the device's memory."""
    with torch.no_grad(), arena.stopwatch.context():
        source = torch.ones(_COPY_BYTES[arena.device.type] // 4, device=arena.device)
        copy = torch.empty_like(source)

        def run(_number: int) -> None:
            # By a kernel: a copy in a CUDA graph is left to an engine that reaches two thirds of this (H200).
            torch.mul(source, 1.0, out=copy)

        found = 2 * source.nbytes / median_us(arena, run) / 1e6
    arena.release()
    return found


def median_us(arena: Arena, run: Callable[[int], None]) -> float:
    """Return the median time of a call."""
    calls = arena.stopwatch.prepare(run, 1)
    return percentile(arena.stopwatch.time(calls, Rung(1000.0, 15)).us, 0.5)
