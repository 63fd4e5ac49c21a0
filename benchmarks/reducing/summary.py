"""The flat figures of the benchmark of reductions, from whatever rows there are; what is unknown is left out. Pure."""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

__all__ = ["summarise"]

Row = Mapping[str, Any]

LARGE_BYTES: Final = 64 << 20


def summarise(rows: Sequence[Row]) -> dict[str, float]:
    """Return the figures that are known so far.

    `min_share_of_copy_bandwidth` is over rows that move more than 64 MB. `geomean_vs_max_autotune` is of
    max-autotune time / ours over all rows, `worst_vs_max_autotune` the lowest upper end of its 95 % intervals: below 1
    a row is surely slower. `geomean_fused_vs_eager` is of eager time / ours over chains of several operators.
    `regret_max` is the largest time of a choice / the best kernel's, minus 1; `measurements_share` what the search
    timed / what there was to time.
    """
    found: dict[str, float] = {}
    table = _shard(rows, "rows")
    large = [row["of_copy"] for row in table if row["size_bytes"] > LARGE_BYTES]
    if large:
        found["min_share_of_copy_bandwidth"] = min(large)
    if table:
        found["geomean_vs_max_autotune"] = _geomean(row["ratio"] for row in table)
        found["worst_vs_max_autotune"] = min(row["ratio_high"] for row in table)
    chains = [row["over_eager"] for row in table if row["chain"]]
    if chains:
        found["geomean_fused_vs_eager"] = _geomean(chains)
    raced = _shard(rows, "regret")
    if raced:
        found["regret_max"] = max(row["regret"] for row in raced)
        found["tuning_spread_max"] = max(row["spread"] for row in raced)
        asked = math.fsum(sum(row["asked"]) / len(row["asked"]) for row in raced)
        found["measurements_share"] = asked / sum(row["timed"] for row in raced)
    return found


def _geomean(values: Iterable[float]) -> float:
    logs = [math.log(value) for value in values]
    return math.exp(math.fsum(logs) / len(logs))


def _shard(rows: Iterable[Row], shard: str) -> list[Row]:
    return [row for row in rows if row["shard"] == shard and "failed" not in row]
