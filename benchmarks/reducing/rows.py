"""The table: eager, `torch.compile` at its best and the tuned choice of every row, interleaved in one process."""

from collections.abc import Sequence
from typing import Any, Final

import torch
from bench.arena import Arena, extern
from bench.compiled import compile_function, eager
from bench.limits import measure_copy
from bench.run import Bench, attempt, print_table
from bench.tuned import Tuned, tune_forms

from reducing.operations import operation_named
from reducing.shapes import Row
from tune_model.tune.candidate import label
from tune_model.tune.measuring.inputs import make_inputs
from tune_model.tune.measuring.interval import Ratio, paired_ratio

__all__ = ["run_rows"]

SHARD: Final = "rows"
SEED: Final = 20_004
"""Not one of the tuner's: its seeds come from the tasks' keys."""

_RESERVE_S: Final = 5.0
"""Compiling a peer and measuring a row, inputs and reference included."""


def run_rows(bench: Bench, rows: Sequence[Row]) -> None:
    """Tune what is not tuned yet, then compile peers and measure what is not in the file, until the time is over."""
    missing = bench.missing(SHARD, rows)
    if missing:
        bench.tell(f"{len(missing)} of {len(rows)} rows to measure")
        left_s = bench.clock.left_s
        budget_s = None if left_s is None else max(0.3 * left_s, left_s - _RESERVE_S * len(missing))
        forms = [row.form for row in missing]
        tuned = tune_forms(forms, bench.shop, bench.shop.options(budget_s=budget_s), bench.tell)
        arena = Arena(bench.shop.target)
        copy_tbps = measure_copy(arena)
        bench.ledger.record("machine", "limits", {"copy_tbps": copy_tbps})
        bench.tell(f"copy {copy_tbps:.3f} TB/s")
        for row in missing:
            if bench.clock.is_over:
                bench.tell("time is over; run again to continue")
                break
            if tuned.is_searched(row.form):
                found = attempt(bench, SHARD, row.name, lambda row=row: _measure(arena, row, tuned, copy_tbps))  # type: ignore[misc]
                if found is not None:
                    bench.tell(f"  {row.name}: {_shown(found)}, compiled in {found['compile_s']:.1f} s")
    _print(bench)


def _shown(row: dict[str, Any]) -> str:
    return (
        f"eager {row['eager_us']:.2f}, max-autotune {row['max_autotune_us']:.2f}, ours {row['ours_us']:.2f} us "
        f"({row['ratio']:.3f}, {100 * row['of_copy']:.0f} % of copy)"
    )


def _measure(arena: Arena, row: Row, tuned: Tuned, copy_tbps: float) -> dict[str, Any]:
    form, operation = row.form, operation_named(row.operation)
    winner = tuned.winner(form)
    same = winner.family == "aten"
    compiled = compile_function(operation.function, make_inputs(form, arena.device, SEED)[0])
    contenders = [extern(form, arena.target), eager(operation.function), compiled.contender]
    if not same:
        contenders.append(tuned.contender("ours", form))
    timed = arena.meet(form, contenders, seed=SEED, budget_s=0.5)
    torch._dynamo.reset()
    plain, peer, ours = timed["eager"], timed["max_autotune"], timed["extern" if same else "ours"]
    ratio = paired_ratio(peer.us, ours.us)
    # An operator that is one kernel is what the tuner's baseline runs: against itself its ratio is 1 by definition.
    over_eager = Ratio(1.0, 1.0, 1.0) if same and not operation.chain else paired_ratio(plain.us, ours.us)
    us = ours.median_us
    size_bytes = row.facts["size_bytes"]
    return {
        **row.facts,
        "winner": label(winner),
        "status": tuned.choices[form].status,
        "compile_s": compiled.compile_s,
        "eager_us": plain.median_us,
        "extern_us": timed["extern"].median_us,
        "max_autotune_us": peer.median_us,
        "ours_us": us,
        "ratio": ratio.median,
        "ratio_low": ratio.low,
        "ratio_high": ratio.high,
        "over_eager": over_eager.median,
        "over_eager_low": over_eager.low,
        "over_eager_high": over_eager.high,
        "rounds": len(ours.us),
        "tbps": size_bytes / us / 1e6,
        "of_copy": size_bytes / us / 1e6 / copy_tbps,
        "error": ours.error,
        "eager_error": plain.error,
        "peer_error": peer.error,
        "disturbed": any(found.disturbed for found in timed.values()),
    }


def _print(bench: Bench) -> None:
    head = ("row", "eager us", "max-autotune us", "ours us", "ratio", "95 % interval", "TB/s", "of copy", "winner")
    body = [
        (
            row["row"],
            f"{row['eager_us']:.2f}",
            f"{row['max_autotune_us']:.2f}",
            f"{row['ours_us']:.2f}",
            f"{row['ratio']:.3f}",
            f"{row['ratio_low']:.3f} to {row['ratio_high']:.3f}",
            f"{row['tbps']:.2f}",
            f"{100 * row['of_copy']:.0f} %",
            row["winner"],
        )
        for row in sorted(bench.finished(SHARD), key=lambda r: (r["operation"], r["rows"] * r["columns"]))
    ]
    print_table(bench, "Tuned against eager and torch.compile", head, body)
