"""The flat figures of all rows."""

from collections.abc import Mapping, Sequence
from typing import Any

__all__ = ["summarise"]


def summarise(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Return the figures of `benchmarks/README.md`; what was not tried counts nothing."""
    works = [row for row in rows if "failed" not in row and row["status"] == "works"]
    refused = [row for row in rows if "failed" not in row and row["status"] == "refused"]
    decoders = [row for row in works if row.get("tokens")]
    covered = [row["covered"] for row in works if row.get("covered") is not None]
    return {
        "models": float(len(rows)),
        "works": float(len(works)),
        "refused_with_reason": float(len(refused)),
        "failed": float(len(rows) - len(works) - len(refused)),
        "decoders": float(len(decoders)),
        "tokens_equal_share": _share(decoders),
        "largest_error": max((row["error"] for row in works), default=0.0),
        "all_matmuls_in_tasks": float(sum(share > 0.9999 for share in covered)),
        "attention_not_recognised": float(sum(row["spelled_attention"] for row in works)),
    }


def _share(rows: Sequence[Mapping[str, Any]]) -> float:
    total = sum(row["tokens"][1] for row in rows)
    return sum(row["tokens"][0] for row in rows) / total if total else 0.0
