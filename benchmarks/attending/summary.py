"""The flat figures of the benchmark of attention, from whatever rows there are; what is unknown is left out. Pure."""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

__all__ = ["summarise"]

Row = Mapping[str, Any]

LONG: Final = 8192
FOLLOWS_FROM: Final = 2048


def summarise(rows: Sequence[Row]) -> dict[str, float]:
    """Return the figures that are known so far.

    `decode_bw_share_8k` is the lowest bandwidth over the K/V in use / copy bandwidth at 8192 tokens and more, rows of
    equal length. `decode_b16_speedup_vs_masked` is of masked SDPA over repeated K/V, at 1024 tokens in a cache of 1088.
    `decode_cost_spread` is how far time per byte in use differs at batch 16 between 2048 tokens and more, rows of
    different length among them. `prefill_N_us` is our time; `prefill_vs_best_backend` the lowest ratio of the best of
    ATen's backends / ours over plain prompts.
    """
    found: dict[str, float] = {}
    decode, prefill = _shard(rows, "decode"), _shard(rows, "prefill")
    long = [row["of_copy"] for row in decode if row["low"] == row["high"] >= LONG - 1]
    if long:
        found["decode_bw_share_8k"] = min(long)
    for row in decode:
        if row["masked_us"] is not None and row["batch"] == 16:
            found["decode_b16_speedup_vs_masked"] = row["over_masked"]
    costs = [
        row["ours_us"] / row["used_bytes"] for row in decode if row["batch"] == 16 and row["low"] >= FOLLOWS_FROM - 1
    ]
    if len(costs) > 1:
        found["decode_cost_spread"] = max(costs) / min(costs) - 1.0
    plain = [row for row in prefill if row["kind"] == "plain"]
    for row in plain:
        if row["length"] in {2048, 8192}:
            found[f"prefill_{row['length']}_us"] = row["ours_us"]
    ratios = [row["ratio"] for row in plain if row["ratio"] is not None]
    if ratios:
        found["prefill_vs_best_backend"] = min(ratios)
    others = [row["extern_us"] / row["ours_us"] for row in prefill if row["kind"] != "plain"]
    if others:
        found["other_masks_vs_eager"] = math.exp(math.fsum(map(math.log, others)) / len(others))
    return found


def _shard(rows: Iterable[Row], shard: str) -> list[Row]:
    return [row for row in rows if row["shard"] == shard and "failed" not in row]
