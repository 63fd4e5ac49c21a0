"""What the device can do at most, measured in the same run: the roofline's two sides."""

from collections.abc import Callable
from typing import Final

import msgspec
import torch

from matmuls.arena import Arena
from matmuls.shapes import Matmul
from tune_model.tune.interval import percentile
from tune_model.tune.policy import Rung

__all__ = ["Machine", "measure_machine", "roofline_us"]

_COPY_BYTES: Final = {"cuda": 2 << 30, "cpu": 64 << 20}
_SIDE: Final = {"cuda": 8192, "cpu": 512}


class Machine(msgspec.Struct, frozen=True):
    """Measured limits.

    Attributes:
        copy_tbps: Bytes read plus bytes written by a copy within the device's memory.
        matmul_tflops: A square bfloat16 product by the vendor's library, on random-normal data.
    """

    copy_tbps: float
    matmul_tflops: float


def measure_machine(arena: Arena) -> Machine:
    """Measure a large copy and a large matmul."""
    with torch.no_grad():
        machine = Machine(_copy_tbps(arena), _matmul_tflops(arena))
    arena.release()
    return machine


def roofline_us(row: Matmul, machine: Machine) -> float:
    """Return the least time of a row: everything moved once, or every multiplication done."""
    return max(row.size_bytes / machine.copy_tbps, row.flops / machine.matmul_tflops) / 1e6


def _copy_tbps(arena: Arena) -> float:
    with arena.stopwatch.context():
        source = torch.empty(_COPY_BYTES[arena.device.type], dtype=torch.uint8, device=arena.device).fill_(1)
        copy = torch.empty_like(source)

    def run(_number: int) -> None:
        copy.copy_(source)

    return 2 * source.numel() / _median_us(arena, run) / 1e6


def _matmul_tflops(arena: Arena) -> float:
    side = _SIDE[arena.device.type]
    with arena.stopwatch.context():
        a = torch.randn(side, side, device=arena.device, dtype=torch.bfloat16)
        out = torch.empty_like(a)

    def run(_number: int) -> None:
        torch.mm(a, a, out=out)

    return 2 * side**3 / _median_us(arena, run) / 1e6


def _median_us(arena: Arena, run: Callable[[int], None]) -> float:
    calls = arena.stopwatch.prepare(run, 1)
    return percentile(arena.stopwatch.time(calls, Rung(1000.0, 15)).us, 0.5)
