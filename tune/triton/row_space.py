"""Configurations of row kernels: tiles, loops, warps and splits that make sense for a nest, the likeliest first.

Two geometries: columns that lie along memory (each warp reads a stretch of a row) and rows that do (a reduction over
leading dims: each warp reads a stretch of neighbouring rows, and a tile is wide in rows and short in columns).
"""

import math
from collections.abc import Iterable, Iterator
from typing import Final, NamedTuple

from tune_model.runtime.expression import Dim, evaluate, product
from tune_model.runtime.program import Form
from tune_model.runtime.replay import slot_sizes
from tune_model.tune.candidate import Config, Effort
from tune_model.tune.loops.ir import Load, LoopNest
from tune_model.tune.search.order import LIMITS, thin, with_dependent_launch
from tune_model.tune.target import CudaTarget
from tune_model.tune.triton.launch import SizeOf

__all__ = ["Geometry", "counted", "geometry_of", "row_space", "split_space"]

MOST_ELEMENTS: Final = 65536
"""Of a tile; more does not fit the registers of any block."""

_WARPS: Final = (1, 2, 4, 8, 16, 32)
_LOOPS: Final = ((1, 1), (1, 2), (1, 4), (3, 1))
"""Stages and unrolling; both at once only make code longer."""

_SPLITS: Final = (2, 4, 8, 16, 32, 64, 128, 256)
_BLOCKS: Final = (1024, 2048, 4096, 8192)


class Geometry(NamedTuple):
    """What a search space depends on.

    Attributes:
        rows: How many there are.
        width: Columns.
        across: Rows lie along memory, columns do not.
        item_bytes: Of the widest element that is read per row and column.
    """

    rows: int
    width: int
    across: bool
    item_bytes: int

    @property
    def whole(self) -> int:
        """The block that holds a row: the next power of two."""
        return 1 << max(0, self.width - 1).bit_length()


_BYTES = {"float64": 8, "int64": 8, "float32": 4, "int32": 4, "float16": 2, "bfloat16": 2, "int16": 2}


def geometry_of(nest: LoopNest, form: Form) -> Geometry:
    """Return a nest's geometry at the form's sizes."""
    values = slot_sizes(form)
    split = len(nest.axes) - nest.inner
    rows = evaluate(product(tuple(a.extent for a in nest.axes[:split])), values)
    width = evaluate(product(tuple(a.extent for a in nest.axes[split:])), values)
    votes = {True: 0, False: 0}
    widest = 1
    for node in nest.nodes:
        if isinstance(node, Load):
            strides = [abs(evaluate(s, values)) for s in node.access.strides]
            over_rows, over_columns = _least(strides[:split]), _least(strides[split:])
            if over_rows and over_columns:
                widest = max(widest, _BYTES.get(node.dtype, 1))
                votes[over_rows < over_columns] += 1
    across = votes[True] > votes[False] and rows > 1
    return Geometry(rows, width, across, widest)


def _least(strides: list[int]) -> int:
    return min((s for s in strides if s), default=0)


def counted(extent: Dim, shape: Geometry) -> SizeOf:
    """Return the number of rows as an argument.

    Where rows lie along memory, accesses are wide only if their mask is known to change at multiples of 16 rows.
    """
    return SizeOf(extent, divisible=shape.across and shape.rows % 16 == 0)


def _limited(configurations: Iterable[Config], target: CudaTarget, effort: Effort) -> Iterator[Config]:
    """Offer dependent launch; a quick search is a list, any other a descent that sees the whole space."""
    offered = with_dependent_launch(configurations, offered=target.arch >= 90)
    share = 1.0 if effort is Effort.QUICK else LIMITS[Effort.THOROUGH] / LIMITS[effort]
    return thin(offered, effort, share)


def row_space(shape: Geometry, target: CudaTarget, effort: Effort) -> Iterator[Config]:
    """Yield configurations of programs that own their rows."""
    space: list[Config] = []
    for rows, block in _tiles(shape):
        loops = _LOOPS if block < shape.width else _LOOPS[:1]
        for warps in _WARPS:
            least, most = (2, 128) if block >= shape.width else (4, 64)
            if not least <= rows * block / (32 * warps) <= most and not _smallest(rows, block, warps):
                continue
            for stages, unroll in loops:
                if unroll > 1 and shape.width < 2 * unroll * block:
                    continue
                space.append(_config(rows, block, warps, stages, unroll))
    yield from _limited(sorted(space, key=lambda c: _distance(c, shape, target)), target, effort)


def _config(rows: int, block: int, warps: int, stages: int, unroll: int) -> Config:
    return (("rows", rows), ("block", block), ("num_warps", warps), ("stages", stages), ("unroll", unroll))


def _smallest(rows: int, block: int, warps: int) -> bool:
    """Whether one warp holds a tile that is smaller than two elements per thread."""
    return warps == 1 and rows * block <= 64


def _tiles(shape: Geometry) -> Iterator[tuple[int, int]]:
    """Yield rows and columns of tiles: whole rows, or a block of them at a time."""
    largest = 1 << max(0, shape.rows - 1).bit_length()
    if shape.across:
        most_rows, most_columns = max(8, largest), max(4, shape.whole)
        least = min(256, most_rows * most_columns)
        for rows in (8, 16, 32, 64, 128, 256, 512):
            for block in (4, 8, 16, 32, 64, 128, 256):
                if rows <= most_rows and block <= most_columns and least <= rows * block <= 16384:
                    yield rows, block
        return
    for block in (*(b for b in _BLOCKS if b < shape.width), shape.whole):
        for rows in (1, 2, 4, 8, 16, 32, 64, 128):
            if rows <= largest and rows * block <= MOST_ELEMENTS and (block >= shape.width or rows <= 2):
                yield rows, block


def _distance(config: Config, shape: Geometry, target: CudaTarget) -> float:
    """Say how far a configuration is from the heuristic, in notches; the nearest is tried first."""
    values = {name: int(value) for name, value in config}
    if shape.across:
        wanted = (64, min(32, shape.whole))
        while wanted[0] > 8 and -(-shape.rows // wanted[0]) < target.sm_count:
            wanted = (wanted[0] // 2, min(shape.whole, wanted[1] * 2))
    elif shape.whole <= 16384:
        # Short rows are packed to about 2048 elements, while every multiprocessor still gets four programs.
        wanted = (max(1, min(2048 // shape.whole, shape.rows // (4 * target.sm_count))), shape.whole)
    else:
        wanted = (1, 8192)
    # Sixteen bytes per thread and load, twice.
    wanted_warps = min(32, max(1, wanted[0] * wanted[1] * shape.item_bytes // 1024))
    loop = _LOOPS.index((values["stages"], values["unroll"]))
    return (
        abs(math.log2(values["block"] / wanted[1]))
        + abs(math.log2(values["rows"] / wanted[0]))
        + abs(math.log2(values["num_warps"] / wanted_warps))
        + 0.6 * loop
    )


def split_space(shape: Geometry, target: CudaTarget, effort: Effort, *, last_joins: bool = False) -> Iterator[Config]:
    """Yield configurations of programs that share rows; none where the rows alone fill the device.

    With `last_joins`, a row's last program may join the parts itself.
    """
    space: list[Config] = []
    for rows, block in _split_tiles(shape):
        tiles = -(-shape.rows // rows)
        blocks = -(-shape.width // block)
        for splits in _SPLITS:
            # Fewer programs leave most of the device idle, more have too little to do.
            fewest = min(target.sm_count // 4, tiles * blocks // 2)
            if splits >= 2 * blocks or not fewest <= tiles * splits <= 8 * target.sm_count:
                continue
            steps = -(-blocks // splits)
            for warps in _WARPS:
                if not 16 <= rows * block * shape.item_bytes / (32 * warps) <= 64:
                    continue
                for stages, unroll in _LOOPS if steps > 1 else _LOOPS[:1]:
                    if unroll <= min(2, steps):
                        config = (("splits", splits), *_config(rows, block, warps, stages, unroll))
                        space += [(*config, ("last_joins", joins)) for joins in (last_joins, False)[: 1 + last_joins]]
    ideal = 2 * target.sm_count

    def distance(config: Config) -> float:
        values = {name: int(value) for name, value in config}
        programs = -(-shape.rows // values["rows"]) * values["splits"]
        per_thread = values["rows"] * values["block"] / (32 * values["num_warps"])
        return (
            abs(math.log2(programs / ideal))
            + abs(math.log2(per_thread * shape.item_bytes / 32))
            + 0.5 * abs(math.log2(values["num_warps"] / 8))
            + 0.6 * _LOOPS.index((values["stages"], values["unroll"]))
            + 0.5 * (last_joins - values["last_joins"])
        )

    yield from _limited(sorted(space, key=distance), target, effort)


def _split_tiles(shape: Geometry) -> Iterator[tuple[int, int]]:
    if shape.across:
        yield from ((r, b) for r, b in _tiles(shape) if 1024 <= r * b <= 8192)
        return
    yield from ((1, block) for block in _BLOCKS if shape.width >= max(2 * block, 8192))
