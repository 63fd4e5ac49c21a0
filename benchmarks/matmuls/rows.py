"""The table: extern against the tuned choice for every shape, each measured again in a process that tuned nothing."""

from collections.abc import Sequence
from typing import Any, Final

import msgspec
from bench.arena import Arena, extern
from bench.ledger import rounded
from bench.run import Bench, attempt, print_table
from bench.tuned import Tuned, tune_forms

from matmuls.forms import linear_form
from matmuls.machine import Machine, measure_machine, roofline_us
from matmuls.shapes import Matmul
from tune_model.tune.candidate import label
from tune_model.tune.measuring.interval import Ratio, paired_ratio

__all__ = ["run_rows"]

SHARD: Final = "rows"
SEED: Final = 20_001
"""Not one of the tuner's: its seeds come from the tasks' keys."""

_RESERVE_S: Final = 1.2
"""Measuring a row again, its inputs and reference included."""


def run_rows(bench: Bench, rows: Sequence[Matmul]) -> None:
    """Tune what is not tuned yet, then measure what is not in the file, until the time is over."""
    missing = bench.missing(SHARD, rows)
    if missing:
        bench.tell(f"{len(missing)} of {len(rows)} rows to measure")
        tuned = _tune(bench, missing)
        arena = Arena(bench.shop.target)
        machine = measure_machine(arena)
        bench.ledger.record("machine", "limits", msgspec.structs.asdict(machine))
        bench.ledger.rows = [_restated(row, machine) for row in bench.ledger.rows]  # one roofline for the whole table
        bench.tell(f"copy {machine.copy_tbps:.3f} TB/s, matmul {machine.matmul_tflops:.1f} TFLOP/s")
        for row in missing:
            if bench.clock.is_over:
                bench.tell("time is over; run again to continue")
                break
            if tuned.is_searched(linear_form(row.m, row.n, row.k)):
                attempt(bench, SHARD, row.name, lambda row=row: _measure(arena, row, tuned, machine))  # type: ignore[misc]
    _print(bench)


def _restated(row: dict[str, Any], machine: Machine) -> dict[str, Any]:
    """Return a row of the table with the roofline that was measured last; other rows as they are."""
    if row["shard"] != SHARD or "failed" in row:
        return row
    limit_us = roofline_us(Matmul(row["m"], row["n"], row["k"]), machine)
    return row | {"roofline_us": rounded(limit_us), "of_roofline": rounded(limit_us / row["ours_us"])}


def _tune(bench: Bench, rows: Sequence[Matmul]) -> Tuned:
    left_s = bench.clock.left_s
    budget_s = None if left_s is None else max(0.6 * left_s, left_s - _RESERVE_S * len(rows))
    forms = [linear_form(row.m, row.n, row.k) for row in rows]
    return tune_forms(forms, bench.shop, bench.shop.options(budget_s=budget_s), bench.tell)


def _measure(arena: Arena, row: Matmul, tuned: Tuned, machine: Machine) -> dict[str, Any]:
    form = linear_form(row.m, row.n, row.k)
    winner = tuned.winner(form)
    same = winner.family == "aten"
    contenders = [extern(form, arena.target)]
    if not same:
        contenders.append(tuned.contender("ours", form))
    timed = arena.meet(form, contenders, seed=SEED)
    theirs, ours = timed["extern"], timed["extern" if same else "ours"]
    # The extern against itself is 1 by definition; timing it twice would only sample the noise.
    ratio = Ratio(1.0, 1.0, 1.0) if same else paired_ratio(theirs.us, ours.us)
    us = ours.median_us
    limit_us = roofline_us(row, machine)
    return {
        "m": row.m,
        "n": row.n,
        "k": row.k,
        "owners": list(row.owners),
        "winner": label(winner),
        "status": tuned.choices[form].status,
        "extern_us": theirs.median_us,
        "ours_us": us,
        "ratio": ratio.median,
        "ratio_low": ratio.low,
        "ratio_high": ratio.high,
        "rounds": len(ours.us),
        "roofline_us": limit_us,
        "of_roofline": limit_us / us,
        "tbps": row.weight_bytes / us / 1e6,
        "tflops": row.flops / us / 1e6,
        "extern_error": theirs.error,
        "error": ours.error,
        "disturbed": ours.disturbed or theirs.disturbed,
    }


def _print(bench: Bench) -> None:
    head = ("row", "extern us", "ours us", "ratio", "95 % interval", "roofline us", "TB/s", "winner")
    body = [
        (
            row["row"],
            f"{row['extern_us']:.2f}",
            f"{row['ours_us']:.2f}",
            f"{row['ratio']:.3f}",
            f"{row['ratio_low']:.3f} to {row['ratio_high']:.3f}",
            f"{row['roofline_us']:.2f}",
            f"{row['tbps']:.2f}",
            row["winner"],
        )
        for row in sorted(bench.finished(SHARD), key=lambda r: (r["owners"][0], r["n"], r["k"], r["m"]))
    ]
    print_table(bench, "Tuned against the library", head, body)
