"""What the device can do at most, measured in the same run: the roofline's two sides."""

from typing import Final

import msgspec
import torch
from bench.arena import Arena
from bench.limits import measure_copy, median_us

from matmuls.shapes import Matmul

__all__ = ["Machine", "measure_machine", "roofline_us"]

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
    copy_tbps = measure_copy(arena)
    with torch.no_grad():
        machine = Machine(copy_tbps, _matmul_tflops(arena))
    arena.release()
    return machine


def roofline_us(row: Matmul, machine: Machine) -> float:
    """Return the least time of a row: everything moved once, or every multiplication done."""
    return max(row.size_bytes / machine.copy_tbps, row.flops / machine.matmul_tflops) / 1e6


def _matmul_tflops(arena: Arena) -> float:
    side = _SIDE[arena.device.type]
    with arena.stopwatch.context():
        a = torch.randn(side, side, device=arena.device, dtype=torch.bfloat16)
        out = torch.empty_like(a)

    def run(_number: int) -> None:
        torch.mm(a, a, out=out)

    return 2 * side**3 / median_us(arena, run) / 1e6
