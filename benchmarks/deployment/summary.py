"""The flat figures of all rows."""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

__all__ = ["summarise"]

SMALL_BATCH_TOKENS = 256
"""Batches up to here are compared with eager on a CPU: larger ones are bound by arithmetic that eager does well."""


def summarise(rows: list[dict[str, Any]]) -> dict[str, float]:
    """Return the summary of `serving.h200.json` or `serving.cpu.json`, as far as rows are there."""
    good = [row for row in rows if "failed" not in row]
    made: dict[str, float] = {}
    for shard in ("decode", "prefill"):
        for row in _of(good, shard):
            key = f"{shard}_{row['row']}"
            made[f"{key}_ms"] = row["tuned_ms"]
            times = {f"{key}_wall_ms": "tuned_wall_ms"}
            times |= {f"{key}_{name}": name for name in ("token_ms", "token_wall_ms")}
            for peer in ("max_autotune", "max_autotune_called"):
                times |= {f"{key}_ms_{peer}": f"{peer}_ms", f"{key}_wall_ms_{peer}": f"{peer}_wall_ms"}
            made |= _given(row, times)
            if "max_autotune_ms" in row:
                made[f"{key}_vs_max_autotune"] = 1 / row["max_autotune_ratio"]
    for row in _of(good, "load"):
        made |= _given(row, {key: key for key in ("load_to_first_token_s", "imports_s", "load_s")})
    for row in _of(good, "attach"):
        made["attach_speedup_b1"] = row["speedup"]
    for row in _of(good, "logits"):
        made["logits_error_ratio_max"] = row["error_ratio_max"]
    for row in _of(good, "server"):
        made |= _given(row, {f"server_{key}": key for key in ("errors", "wrong", "tokens_per_s", "grown_bytes")})
    return made | _encoders(_of(good, "encoders"))


def _encoders(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    made: dict[str, float] = {}
    for peer, suffix in (("max_autotune", ""), ("compile_freezing", "_vs_freezing")):
        against = [row for row in rows if f"{peer}_ratio" in row]
        if against:
            made[f"encoder_geomean{suffix}"] = _geomean(row[f"{peer}_ratio"] for row in against)
            made[f"encoder_worst{suffix}"] = min(row[f"{peer}_ratio_high"] for row in against)
            made["encoder_rows"] = len(against)
    short = [row for row in rows if "compile_freezing_ratio" in row and row["tokens"] <= SMALL_BATCH_TOKENS]
    if short:
        made["encoder_geomean_vs_eager"] = _geomean(row["eager_ratio"] for row in short)
        made["encoder_worst_vs_eager"] = min(row["eager_ratio_high"] for row in short)
    return made


def _of(rows: Sequence[dict[str, Any]], shard: str) -> list[dict[str, Any]]:
    return [row for row in rows if row["shard"] == shard]


def _given(row: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, float]:
    return {key: row[name] for key, name in names.items() if name in row}


def _geomean(values: Iterable[float]) -> float:
    logs = [math.log(value) for value in values]
    return math.exp(math.fsum(logs) / len(logs))
