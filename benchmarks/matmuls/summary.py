"""The flat figures of the matmul benchmark, from whatever rows there are; what is unknown is left out. Pure."""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

__all__ = ["summarise"]

Row = Mapping[str, Any]

_BANDS: Final = (("geomean_m_le_16", 0, 16), ("geomean_m_32_128", 17, 128), ("geomean_m_gt_128", 129, math.inf))
_MODEL: Final = "Llama-3-8B"


def summarise(rows: Sequence[Row]) -> dict[str, float]:
    """Return the figures that are known so far.

    `worst_*` are the lowest upper ends of 95 % intervals of extern (or max-autotune) time / ours: below 1 a row is
    surely slower. `share_ge_max_autotune` counts the rows that are not. `*_tbps` are bytes of weights per time of
    Llama-3-8B's matmuls with one row. `regret_max` is the largest time of a choice / the best kernel's, minus 1.
    """
    found: dict[str, float] = {}
    table = _shard(rows, "rows")
    for key, low, high in _BANDS:
        gains = [row["ratio"] for row in table if low <= row["m"] <= high]
        if gains:
            found[key] = math.exp(math.fsum(map(math.log, gains)) / len(gains))
    if table:
        found["worst_vs_extern"] = min(row["ratio_high"] for row in table)
    compared = _shard(rows, "max-autotune")
    if compared:
        found["share_ge_max_autotune"] = sum(row["ratio_high"] >= 1.0 for row in compared) / len(compared)
        found["worst_vs_max_autotune"] = min(row["ratio_high"] for row in compared)
    for part in ("head", "gate_up", "down", "qkv", "o"):
        name = "lm_head_tbps" if part == "head" else f"{part}_tbps"
        for row in table:
            if row["m"] == 1 and f"{_MODEL} {part}" in row["owners"]:
                found[name] = row["tbps"]
    for row in _shard(rows, "llama-tuning"):
        found["tune_s_llama_8b"] = row["seconds"]
        found["tune_candidates_per_s"] = row["candidates_per_s"]
    raced = _shard(rows, "regret")
    if raced:
        found["regret_max"] = max(row["regret"] for row in raced)
        found["tuning_spread_max"] = max(row["spread"] for row in raced)
    return found


def _shard(rows: Iterable[Row], shard: str) -> list[Row]:
    return [row for row in rows if row["shard"] == shard and "failed" not in row]
