"""The flat figures of all rows."""

from collections.abc import Mapping
from typing import Any, Final

__all__ = ["summarise"]

Row = Mapping[str, Any]

_GAINS: Final = ("gains_compared", "gains_moved", "gains_compared_without", "gains_moved_without")


def summarise(rows: list[dict[str, Any]]) -> dict[str, float]:
    """Return the figures of `benchmarks/README.md`; what was not run counts nothing."""
    done = [row for row in rows if "failed" not in row]
    kills = _of(done, "kills")
    hostile = [row for row in _of(done, "hostile") if "expected" in row]
    return {
        "kills": float(sum(row["row"].startswith("kill ") for row in kills)),
        "measurements_lost": float(sum(row.get("lost", 0) for row in (*kills, *_of(done, "sharing")))),
        "choices_beyond_noise": float(sum(row.get("beyond_noise", 0) for row in kills)),
        "choices_undecided": float(sum(row.get("undecided", 0) for row in kills)),
        "hostile_kinds": float(len(hostile)),
        "hostile_unreported": float(sum(row["found"] != [row["expected"]] for row in hostile)),
        **{key: float(sum(row.get(key, 0) for row in _of(done, "hostile"))) for key in _GAINS},
        "good_timings_moved": float(sum(row.get("moved", 0) for row in _of(done, "hostile"))),
        "orphans": float(sum(row.get("orphans", 0) for row in done)),
        "fuzzed_artifacts": _total(done, "fuzz-artifacts", "cases"),
        "fuzzed_texts": _total(done, "fuzz-texts", "cases"),
        "fuzz_unexpected": float(sum(len(row.get("unexpected", ())) for row in done)),
        "planted_finals_won": float(sum(row["won_finals"] for row in _of(done, "winners"))),
        "wrong_winners": float(sum(row.get("chosen", 0) + row.get("hostile_winners", 0) for row in done)),
        "failed_rows": float(len(rows) - len(done)),
    }


def _of(rows: list[dict[str, Any]], shard: str) -> list[dict[str, Any]]:
    return [row for row in rows if row["shard"] == shard]


def _total(rows: list[dict[str, Any]], shard: str, field: str) -> float:
    return float(sum(row[field] for row in _of(rows, shard)))
