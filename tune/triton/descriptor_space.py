"""Which configurations of the descriptor kernel are worth building, most promising first.

A configuration is a tile and a mode: whether programs are persistent, how the epilogue stores. Tiles are ranked by
anchors and by how evenly they fill the device; every mode is met early with the best tiles.

No mode lets some warps only fetch: with `warp_specialize` Triton 3.6 compiled these kernels for Hopper to code that
left parts of a tile unwritten.
"""

import math
from functools import lru_cache
from typing import Final, NamedTuple

from tune_model.tune.candidate import Config
from tune_model.tune.target import CudaTarget
from tune_model.tune.triton.descriptor_plan import stores_through_descriptor
from tune_model.tune.triton.matmul_plan import ELEMENT_BYTES, Product

__all__ = ["descriptor_space"]

_FEW_ROWS: Final = 64


class _Tile(NamedTuple):
    block_m: int
    block_n: int
    block_k: int
    num_stages: int
    num_warps: int


class _Mode(NamedTuple):
    """How tiles are walked and finished.

    Attributes:
        waves: Programs per multiprocessor that walk the tiles; 0 gives each tile a program.
        subtiles: Parts of the columns that the epilogue takes one after another.
        store: Through a descriptor.
    """

    waves: int
    subtiles: int
    store: bool


# Order is the prior. Large tiles fill Hopper's tensor cores; smaller ones end in fuller waves.
_MANY: Final = (
    _Tile(128, 256, 64, 4, 8),
    _Tile(128, 256, 64, 3, 8),
    _Tile(256, 128, 64, 4, 8),
    _Tile(128, 128, 64, 4, 4),
    _Tile(128, 256, 64, 3, 4),
    _Tile(256, 128, 64, 3, 8),
    _Tile(128, 128, 64, 5, 8),
    _Tile(128, 128, 128, 3, 8),
    _Tile(64, 256, 64, 4, 4),
    _Tile(128, 128, 64, 3, 4),
    _Tile(64, 256, 64, 4, 8),
    _Tile(64, 128, 64, 5, 4),
    _Tile(128, 64, 64, 5, 4),
    _Tile(64, 128, 128, 4, 4),
    _Tile(128, 64, 128, 4, 4),
    _Tile(64, 256, 128, 2, 4),
    _Tile(128, 128, 32, 5, 4),
    _Tile(64, 64, 128, 5, 4),
    _Tile(256, 64, 64, 4, 8),
    _Tile(64, 64, 64, 6, 4),
)
# With few rows the weights are the left operand: block_n is the wide side, and block_m the rows themselves.
_FEW: Final = (
    _Tile(0, 64, 128, 5, 4),
    _Tile(0, 128, 64, 6, 4),
    _Tile(0, 128, 128, 4, 4),
    _Tile(0, 64, 256, 3, 4),
    _Tile(0, 64, 64, 8, 4),
    _Tile(0, 128, 128, 3, 8),
    _Tile(0, 64, 128, 7, 4),
    _Tile(0, 256, 64, 4, 8),
    _Tile(0, 128, 256, 2, 8),
    _Tile(0, 64, 128, 3, 4),
    _Tile(0, 128, 64, 4, 4),
)

_PERSISTENT: Final = (
    _Mode(1, 1, False),
    _Mode(1, 2, True),
    _Mode(0, 1, False),
    _Mode(1, 1, True),
    _Mode(1, 2, False),
    _Mode(2, 1, False),
    _Mode(0, 2, True),
)
_SINGLE: Final = (
    _Mode(0, 1, False),
    _Mode(1, 1, False),
    _Mode(2, 1, False),
)

_RESERVED_BYTES: Final = 1024
"""Of shared memory, for barriers."""


@lru_cache(maxsize=16)  # a family that accepts a task is asked for its configurations next
def descriptor_space(product: Product, target: CudaTarget) -> tuple[Config, ...]:
    """Configurations of `descriptor_matmul`, best guess first.

    Args:
        product: Without a `refusal`.
        target: Whose multiprocessors the programs are counted by.
    """
    few = product.m <= _FEW_ROWS
    found: dict[Config, float] = {}
    for rank, tile in enumerate(_cut(product, few=few)):
        for swap in (True, False) if few else (False,):
            for splits in _splits(product, tile, target):
                base = 0.15 * rank + (0.0 if swap == few else 1.0) + _idle(product, tile, splits, target)
                for place, mode in enumerate(_SINGLE if few else _PERSISTENT):
                    # With no more tiles than programs, persistent ones end after their first.
                    if _tiles(product, tile) * splits <= mode.waves * target.sm_count:
                        continue
                    if not _fits(product, tile, mode, splits, target, swap=swap):
                        continue
                    for group, late in ((8, 0.0), (4, 2.0), (16, 2.2)) if product.m > 256 else ((8, 0.0),):
                        config = _config(tile, mode, splits, group, target, swap=swap)
                        cost = base + 0.35 * place + late
                        for last_adds, more in _sums(splits):
                            for joined, dearer in _joins(product, swap=swap):
                                done = (*config, *joined, ("last_adds", last_adds))
                                found.setdefault(done, cost + more + dearer)
    return tuple(sorted(found, key=lambda config: found[config]))


def _sums(splits: int) -> tuple[tuple[bool, float], ...]:
    """Return who may add the parts, and what that costs: the last program saves a launch, a kernel spreads the work."""
    return ((False, 0.0),) if splits == 1 else ((True, 0.0), (False, 1.0))


def _joins(product: Product, *, swap: bool) -> tuple[tuple[Config, float], ...]:
    """Return how two halves may be multiplied, and what that costs: as one tile they share the rows that are read."""
    if product.halves == 1:
        return (((), 0.0),)
    apart: Config = (("joined", False),)
    if swap or product.w_strides[2] != 1:
        return ((apart, 0.0),)
    return (((("joined", True),), 0.0), (apart, 0.5))


def _cut(product: Product, *, few: bool) -> list[_Tile]:
    """Return the anchors cut to the task: no block longer than what it covers, half the columns for two halves."""
    rows = max(16, 1 << (product.m - 1).bit_length())
    columns = max(32, 1 << (product.n - 1).bit_length())
    length = max(32, 1 << (product.k - 1).bit_length())
    element = ELEMENT_BYTES[product.epilogue.dtype]
    cut: dict[_Tile, None] = {}
    for tile in _FEW if few else _MANY:
        wide = tile.block_n // product.halves if tile.block_n > 64 else tile.block_n
        block_k = min(tile.block_k, length) * 2 // element if tile.block_k > 32 else tile.block_k
        block_m = rows if few else min(tile.block_m, rows)
        cut[tile._replace(block_m=block_m, block_n=min(wide, columns), block_k=block_k)] = None
    return list(cut)


def _tiles(product: Product, tile: _Tile) -> int:
    return -(-product.m // tile.block_m) * -(-product.n // tile.block_n)


def _splits(product: Product, tile: _Tile, target: CudaTarget) -> list[int]:
    """Return into how many ranges k may be split: only where the tiles alone leave the device idle."""
    programs = _tiles(product, tile)
    steps = -(-product.k // tile.block_k)
    most = min(2 * target.sm_count // programs, steps // 3)
    return [1, *(splits for splits in (2, 3, 4, 6, 8, 12, 16) if splits <= most)]


def _idle(product: Product, tile: _Tile, splits: int, target: CudaTarget) -> float:
    """Penalty for multiprocessors that are idle in the last wave, for rows of padding, and for the second pass."""
    waves = _tiles(product, tile) * splits / target.sm_count
    idle = math.ceil(waves) / waves - 1.0
    padding = -(-product.m // tile.block_m) * tile.block_m / product.m - 1.0 if product.m > _FEW_ROWS else 0.0
    second = 0.0 if splits == 1 else 0.3 + 0.05 * splits
    return 1.5 * min(2.0, idle) + min(2.0, padding) + second


def _fits(product: Product, tile: _Tile, mode: _Mode, splits: int, target: CudaTarget, *, swap: bool) -> bool:
    element = ELEMENT_BYTES[product.epilogue.dtype]
    wide = tile.block_n if swap else tile.block_m
    accumulators = tile.block_m * tile.block_n * product.halves
    if swap and (wide < 64 or mode.subtiles > 1 or mode.store):
        return False
    if mode.subtiles > 1 and splits > 1:
        return False
    if mode.store and (splits > 1 or not stores_through_descriptor(product)):
        return False
    if mode.subtiles > 1 and tile.block_n // mode.subtiles < 32:
        return False
    if not 4 <= accumulators / (32 * tile.num_warps) <= 128:
        return False
    loads = (tile.block_m + tile.block_n * product.halves) * tile.block_k * element
    finishing = tile.block_m * tile.block_n // mode.subtiles * (4 if splits > 1 else element)
    stages = tile.num_stages * loads
    held = stages + finishing if mode.waves else max(stages, finishing)
    return held + _RESERVED_BYTES <= target.shared_bytes


def _config(tile: _Tile, mode: _Mode, splits: int, group: int, target: CudaTarget, *, swap: bool) -> Config:
    return (
        ("block_m", tile.block_m),
        ("block_n", tile.block_n),
        ("block_k", tile.block_k),
        ("group_m", group),
        ("num_warps", tile.num_warps),
        ("num_stages", tile.num_stages),
        ("swap", swap),
        ("split_k", splits),
        ("programs", mode.waves * target.sm_count),
        ("subtiles", mode.subtiles),
        ("store", mode.store),
    )
