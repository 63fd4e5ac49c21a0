"""Which matmul configurations are worth building, most promising first.

Anchors are tiles that won on some shape (measured on H200 with Triton 3.6) and the list that Inductor searches; they
come first, then everything legal by its distance to the nearest anchor.
"""

import math
from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache

from tune_model.tune.candidate import Config
from tune_model.tune.relayout import TRANSPOSED
from tune_model.tune.search.order import interleave
from tune_model.tune.target import CudaTarget
from tune_model.tune.triton.matmul_plan import ELEMENT_BYTES, Product

__all__ = ["INDUCTOR", "INVARIANT_ROWS", "gemv_space", "matmul_space", "split_k_space", "with_layouts"]

# block_n, block_k, num_warps, stages, unroll. One row: winners on Llama-3-8B's shapes.
_GEMV_ANCHORS = (
    (1, 2048, 8, 3, 1),
    (1, 2048, 4, 3, 1),
    (1, 256, 1, 3, 1),
    (2, 1024, 4, 3, 1),
    (1, 128, 1, 1, 1),
    (1, 1024, 2, 3, 1),
    (2, 2048, 8, 3, 1),
    (1, 4096, 8, 2, 1),
    (1, 512, 1, 4, 1),
)

# Two to four rows: the left operand is read again by every program, so a program takes several columns.
_GEMV_FEW_ROWS = (
    (4, 512, 4, 3, 1),
    (2, 1024, 4, 3, 1),
    (2, 512, 4, 4, 1),
    (4, 1024, 8, 2, 1),
    (4, 256, 2, 3, 1),
    (8, 512, 8, 2, 1),
    (2, 1024, 8, 3, 1),
    (1, 2048, 8, 2, 1),
)

# Columns contiguous: a program reads pieces of many rows of the stored matrix, at least 64 bytes of each.
_GEMV_TRANSPOSED = (
    (64, 32, 4, 3, 1),
    (32, 64, 4, 3, 1),
    (32, 128, 8, 3, 1),
    (64, 64, 8, 2, 1),
    (128, 16, 4, 3, 1),
)

# block_m, block_n, block_k, num_stages, num_warps: torch 2.13's `mm_configs`.
INDUCTOR = (
    (32, 32, 16, 1, 2),
    (32, 32, 128, 2, 4),
    (32, 64, 32, 5, 8),
    (64, 32, 32, 5, 8),
    (64, 32, 128, 5, 4),
    (64, 64, 16, 2, 4),
    (64, 64, 32, 2, 4),
    (64, 64, 64, 3, 8),
    (64, 64, 128, 5, 4),
    (64, 128, 32, 3, 4),
    (64, 128, 32, 4, 8),
    (64, 128, 64, 3, 4),
    (64, 128, 128, 4, 4),
    (128, 64, 32, 3, 4),
    (128, 64, 32, 4, 8),
    (128, 128, 32, 2, 8),
    (128, 128, 32, 3, 4),
    (128, 128, 64, 3, 4),
    (128, 128, 64, 5, 8),
    (128, 128, 128, 4, 8),
    (128, 256, 64, 4, 8),
)

# The same order, with `swap`: winners with few rows, and the large tiles that fill Hopper's tensor cores.
_FEW_ROWS = (
    (16, 32, 128, 5, 4, False),
    (16, 64, 128, 4, 4, False),
    (16, 64, 128, 4, 4, True),
    (16, 64, 128, 6, 4, True),
    (16, 32, 256, 3, 4, False),
    (16, 128, 128, 4, 4, True),
    (16, 16, 256, 4, 4, False),
    (16, 64, 256, 3, 4, True),
    (16, 128, 64, 5, 4, True),
)
_FEW_ROWS_AT_MOST = 128
"""With fewer rows a product waits for its weights: tiles are chosen for how many are under way at a time."""

_MANY_ROWS = (
    (128, 256, 64, 3, 8, False),
    (256, 128, 64, 3, 8, False),
    (128, 256, 64, 4, 8, False),
    (128, 128, 64, 4, 8, False),
    (128, 128, 64, 4, 4, False),
    (64, 256, 64, 4, 4, False),
    (64, 128, 64, 4, 4, False),
    (128, 64, 64, 4, 4, False),
)
# float32 without tf32 runs on the ordinary cores; larger tiles spill.
_ORDINARY = (
    (64, 64, 32, 3, 8, False),
    (64, 64, 16, 3, 4, False),
    (128, 64, 16, 3, 8, False),
    (64, 64, 16, 4, 8, False),
    (32, 64, 32, 3, 4, False),
    (128, 128, 16, 3, 8, False),
    (64, 32, 32, 3, 4, False),
    (32, 32, 32, 3, 4, False),
)

_BEFORE_INDUCTOR = 60
"""So many tiles come before what is left of Inductor's list."""

INVARIANT_ROWS = (64, 2048)
"""Where one configuration must serve every number of rows, it is taken from the spaces of few and of many."""

_LOG2 = {value: math.log2(value) for value in (*range(1, 17), *(1 << bits for bits in range(5, 15)))}
"""Of every number a configuration holds: spaces have thousands of tiles, and are listed for every task."""

Tile = tuple[int, int, int, int, int, bool]


def with_layouts(plain: Iterable[Config], transposed: Iterable[Config], *, every: int) -> Iterator[Config]:
    """Add the parameter `layout` to two lists and make them one.

    Args:
        plain: For the weight as it is.
        transposed: For the weight stored as its transpose; empty where it cannot be.
        every: How many of the first come before the next of the second.
    """
    yield from interleave(
        ((*config, ("layout", "plain")) for config in plain),
        ((*config, ("layout", TRANSPOSED)) for config in transposed),
        every,
    )


def gemv_space(product: Product, target: CudaTarget) -> list[Config]:
    """Configurations of `gemv`, best guess first."""
    block_m = 1 << (product.m - 1).bit_length()
    element = ELEMENT_BYTES[product.epilogue.dtype]
    along_columns = product.w_strides[1] == 1 and product.w_strides[2] != 1
    blocks_n = (32, 64, 128, 256) if along_columns else (1, 2, 4, 8, 16)
    blocks_k = (8, 16, 32, 64, 128) if along_columns else (128, 256, 512, 1024, 2048, 4096, 8192)
    longest = max(blocks_k[0], 1 << (product.k - 1).bit_length())

    def legal(block_n: int, block_k: int, warps: int, stages: int) -> bool:
        per_thread = block_m * block_n * block_k * product.halves / (32 * warps)
        bytes_ = stages * element * block_k * (block_n * product.halves + block_m)
        return block_k <= longest and 1 <= per_thread <= 128 and bytes_ <= target.shared_bytes

    found = [
        (block_n, block_k, warps, stages, unroll)
        for block_n in blocks_n
        for block_k in blocks_k
        for warps in (1, 2, 4, 8, 16)
        for stages in (1, 2, 3, 4)
        for unroll in (1, 2, 4)
        # Pipelining and unrolling are two ways to keep loads in flight.
        if (unroll == 1 or stages == 1) and legal(block_n, block_k, warps, stages)
    ]
    known = _GEMV_TRANSPOSED if along_columns else _GEMV_ANCHORS if product.m == 1 else _GEMV_FEW_ROWS
    anchors = [(n, max(blocks_k[0], min(k, longest)), w, s, u) for n, k, w, s, u in known]
    columns = product.n * product.batches

    def penalty(tile: tuple[int, ...]) -> float:
        ragged = 0.7 if product.k % tile[1] else 0.0
        idle = max(0.0, math.log2(4 * target.sm_count * tile[0] / max(1, columns)))
        return ragged + idle

    nearest = _distance(anchors)
    ordered = sorted(found, key=lambda t: nearest(t) + penalty(t))
    names = ("block_n", "block_k", "num_warps", "stages", "unroll")
    return [tuple(zip(names, tile, strict=True)) for tile in ordered]


def _distance(anchors: Iterable[tuple[int, ...]]) -> Callable[[tuple[int, ...]], float]:
    """Return the distance in doublings to the nearest anchor; a later anchor counts a little less."""
    doublings = [(0.05 * place, [_LOG2[a] for a in anchor]) for place, anchor in enumerate(anchors)]

    def nearest(tile: tuple[int, ...]) -> float:
        best, here = math.inf, [_LOG2[t] for t in tile]
        for apart, anchor in doublings:
            for a, b in zip(here, anchor, strict=True):
                apart += a - b if a > b else b - a  # noqa: PLW2901 (the sum starts with the anchor's place)
            best = min(best, apart)
        return best

    return nearest


def _rows_tile(m: int) -> int:
    return max(16, min(256, 1 << (m - 1).bit_length()))


def _fits(product: Product, target: CudaTarget) -> Callable[[Tile], bool]:
    element = ELEMENT_BYTES[product.epilogue.dtype]
    ordinary = product.precision == "ieee"
    # Accumulators per thread, of at most 255 registers; on the ordinary cores the operands' elements take some too.
    most = 64 if ordinary else 128

    def fits(tile: Tile) -> bool:
        block_m, block_n, block_k, stages, warps, swap = tile
        accumulators = block_m * block_n * product.halves
        loads = (block_m + block_n * product.halves) * block_k
        # Hopper's warp-group instructions read both operands from shared memory while the next tiles arrive; the older
        # ones have copied a tile to registers by then, so one stage fewer is held.
        wide_side = block_n if swap else block_m
        grouped = target.arch >= 90 and element == 2 and wide_side >= 64 and warps % 4 == 0
        held = max(stages if grouped else stages - 1, 1) * loads * element
        if swap and (ordinary or block_n < 64 or block_m > 64):
            return False
        if ordinary and block_k > 64:
            return False
        return held <= target.shared_bytes and 2 <= accumulators / (32 * warps) <= most and loads / (32 * warps) <= 512

    return fits


def _spread(product: Product, target: CudaTarget) -> list[Tile]:
    """Every tile that fits, unsorted."""
    fits = _fits(product, target)
    rows = _rows_tile(product.m)
    blocks_m = [b for b in (16, 32, 64, 128, 256) if b <= rows and b >= rows // 8]
    blocks_n = [b for b in (16, 32, 64, 128, 256) if b <= max(16, 2 * product.n)]
    blocks_k = [b for b in (16, 32, 64, 128, 256, 512) if b <= max(16, 2 * product.k)]
    tiles: list[Tile] = [
        (block_m, block_n, block_k, stages, warps, swap)
        for block_m in blocks_m
        for block_n in blocks_n
        for block_k in blocks_k
        for stages in (1, 2, 3, 4, 5, 6)
        for warps in (2, 4, 8)
        for swap in (False, True)
    ]
    return [t for t in tiles if fits(t)]


def _anchors(product: Product) -> tuple[list[Tile], list[Tile]]:
    """Return our anchors, and these with Inductor's, cut to the task: no block longer than what it covers."""
    rows, halves = _rows_tile(product.m), product.halves
    few = product.m <= _FEW_ROWS_AT_MOST
    columns, length = 1 << (product.n - 1).bit_length(), 1 << (product.k - 1).bit_length()
    cut: dict[Tile, None] = {}

    def add(tile: Tile, *, fewer_warps: bool) -> None:
        m, n, k, stages, warps, swap = tile
        m = max(16, min(m, rows))
        # Two accumulators: half the columns each.
        n = max(16, min(n // halves if n > 32 else n, columns))
        warps = max(1, min(warps, m * n // 256)) if fewer_warps else warps
        cut[m, n, max(16, min(k, length)), stages, warps, swap and n >= 64] = None

    ordinary = product.precision == "ieee"
    for m, n, k, stages, warps, swap in _ORDINARY if ordinary else _FEW_ROWS if few else _MANY_ROWS:
        # Swapped, the rows are the narrow side; two tiles of 64 fill more of the device than one of 128.
        for block_m in (m,) if ordinary or not few else (rows,) if rows <= 64 else (64,) if swap else (64, rows):
            add((block_m, n, k, stages, warps, swap), fewer_warps=False)
    own = list(cut)
    for m, n, k, stages, warps in INDUCTOR:
        add((m, n, k, stages, warps, False), fewer_warps=True)
    return own, list(cut)


def _programs(product: Product, block_m: int, block_n: int) -> int:
    """Return how many tiles of the result there are, in all batches."""
    return -(-product.m // block_m) * -(-product.n // block_n) * product.batches


def _waves(product: Product, target: CudaTarget, splits: int = 1) -> Callable[[Tile], float]:
    """Penalty for a last wave that leaves multiprocessors idle, and for tails of K."""

    def waves(tile: Tile) -> float:
        block_m, block_n, block_k, *_ = tile
        per_wave = _programs(product, block_m, block_n) * splits / target.sm_count
        idle = math.ceil(per_wave) / per_wave - 1.0
        # Rows that the tile has and the task does not; columns likewise.
        padding = -(-product.m // block_m) * block_m / product.m - 1.0 if product.m > 16 else 0.0
        ragged = 0.7 if product.k % block_k else 0.0
        return min(2.0, idle) + min(2.0, padding) + ragged

    return waves


def matmul_space(product: Product, target: CudaTarget) -> list[Config]:
    """Configurations of `matmul`, best guess first; all of `INDUCTOR` (cut to the task) that fit are among them."""
    own, anchors = _anchors(product)
    fits = _fits(product, target)
    waves = _waves(product, target)
    tiles = dict.fromkeys([t for t in anchors if fits(t)] + _spread(product, target))
    nearest = _distance([(m, n, k, s, w, 1 + x) for m, n, k, s, w, x in own])

    def cost(tile: Tile) -> float:
        m, n, k, s, w, x = tile
        return nearest((m, n, k, s, w, 1 + x)) + waves(tile)

    best = sorted(tiles, key=cost)
    # Inductor's list is always within reach, after what is likely better.
    listed = set(anchors)
    first = best[:_BEFORE_INDUCTOR]
    if product.m <= _FEW_ROWS_AT_MOST:
        # Anchors come early even where they leave multiprocessors idle: half of them read weights nearly as fast.
        first = list(interleave(first, [t for t in own if t in tiles], 1))
    ordered = dict.fromkeys([*first, *(t for t in best if t in listed), *best])
    many = product.m > 256
    configs = [_config(t, group) for t in ordered for group in ((8, 4, 16) if many else (8,))]
    if many:
        # The second and third order of programs after all tiles have been seen once.
        configs = [c for c in configs if ("group_m", 8) in c] + [c for c in configs if ("group_m", 8) not in c]
    return configs


@lru_cache(maxsize=8)  # a family that accepts a task is asked for its configurations next
def split_k_space(product: Product, target: CudaTarget) -> list[Config]:
    """Configurations of split-K, best guess first; only where the unsplit product leaves the device idle."""
    found: list[tuple[float, Config]] = []
    own, anchors = _anchors(product)
    nearest = _distance([(m, n, k, s, w, 1 + x) for m, n, k, s, w, x in own])
    fits = _fits(product, target)
    # How near a tile is to an anchor does not depend on the split, and is most of the work here.
    tiles = {
        (m, n, k, s, w, x): nearest((m, n, k, s, w, 1 + x))
        for m, n, k, s, w, x in dict.fromkeys([t for t in anchors if fits(t)] + _spread(product, target))
        if _programs(product, m, n) * 2 <= 8 * target.sm_count
    }
    for splits in (2, 3, 4, 6, 8, 16):
        waves = _waves(product, target, splits)
        for tile, near in tiles.items():
            m, n, k, *_ = tile
            steps = -(-product.k // k) / splits
            programs = _programs(product, m, n)
            # Too short a range pays for the second pass and fills no pipeline; a full device needs no split.
            if steps < 2 or programs * splits > 8 * target.sm_count:
                continue
            off = abs(math.log2(programs * splits / (2 * target.sm_count)))
            cost = near + waves(tile) + off + 0.1 * splits
            # The last program's sum saves a launch; a second kernel's spreads over the device.
            for last_adds, more in ((True, 0.0), (False, 1.0)):
                found.append((cost + more, (*_config(tile, 8), ("split_k", splits), ("last_adds", last_adds))))
    return [config for _, config in sorted(found, key=lambda pair: pair[0])]


def _config(tile: Tile, group: int) -> Config:
    block_m, block_n, block_k, stages, warps, swap = tile
    return (
        ("block_m", block_m),
        ("block_n", block_n),
        ("block_k", block_k),
        ("group_m", group),
        ("num_warps", warps),
        ("num_stages", stages),
        ("swap", swap),
    )
