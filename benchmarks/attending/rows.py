"""The tables: the tuned choice of every row beside what others run, interleaved in one process."""

from collections.abc import Sequence
from typing import Any, Final

from bench.arena import Arena, Contender, extern
from bench.limits import measure_copy
from bench.run import Bench, attempt, print_table
from bench.tuned import Tuned, tune_forms

from attending.forms import DTYPE
from attending.peers import backends, masked_repeated, sliced
from attending.shapes import Decode, Prefill
from tune_model.extract.cost import flops
from tune_model.runtime.errors import TuneModelError
from tune_model.tune.candidate import label
from tune_model.tune.measuring.inputs import make_inputs
from tune_model.tune.measuring.interval import paired_ratio

__all__ = ["run_decode", "run_prefill"]

SEED: Final = 20_005
"""Not one of the tuner's: its seeds come from the tasks' keys."""

_RESERVE_S: Final = 2.5


def _tune(bench: Bench, rows: Sequence[Decode] | Sequence[Prefill]) -> Tuned:
    left_s = bench.clock.left_s
    budget_s = None if left_s is None else max(0.5 * left_s, left_s - _RESERVE_S * len(rows))
    forms = [row.form for row in rows]
    return tune_forms(forms, bench.shop, bench.shop.options(budget_s=budget_s), bench.tell)


def run_decode(bench: Bench, rows: Sequence[Decode]) -> None:
    """Tune and measure decode steps that are not in the file, until the time is over."""
    missing = bench.missing("decode", rows)
    if missing:
        tuned = _tune(bench, missing)
        arena = Arena(bench.shop.target)
        copy_tbps = measure_copy(arena)
        bench.ledger.record("machine", "limits", {"copy_tbps": copy_tbps})
        bench.tell(f"copy {copy_tbps:.3f} TB/s")
        for row in missing:
            if bench.clock.is_over:
                bench.tell("time is over; run again to continue")
                break
            if tuned.is_searched(row.form):
                attempt(bench, "decode", row.name, lambda row=row: _decode(arena, row, tuned, copy_tbps))  # type: ignore[misc]
    head = ("row", "extern us", "sliced us", "masked us", "ours us", "TB/s", "of copy", "winner")
    body = [
        (
            row["row"],
            f"{row['extern_us']:.1f}",
            _text(row["sliced_us"]),
            _text(row["masked_us"]),
            f"{row['ours_us']:.2f}",
            f"{row['tbps']:.2f}",
            f"{100 * row['of_copy']:.0f} %",
            row["winner"],
        )
        for row in sorted(bench.finished("decode"), key=lambda r: (r["batch"], r["low"], r["high"]))
    ]
    print_table(bench, "Decode: the K/V in use per time", head, body)


def _text(us: float | None) -> str:
    return "" if us is None else f"{us:.1f}"


def _decode(arena: Arena, row: Decode, tuned: Tuned, copy_tbps: float) -> dict[str, Any]:
    form = row.form
    contenders = [extern(form, arena.target), tuned.contender("ours", form)]
    even = row.low == row.high
    if even:
        contenders.append(sliced(row.low + 1))
    if row.masked:
        contenders.append(masked_repeated())
    timed = arena.meet(form, contenders, seed=SEED, budget_s=0.6)
    positions = make_inputs(form, arena.device, SEED)[0][4]
    contexts = int(positions.sum()) + row.batch
    ours = timed["ours"]
    used = row.used_bytes(contexts)
    found = {
        "batch": row.batch,
        "low": row.low,
        "high": row.high,
        "max_length": row.max_length,
        "contexts": contexts,
        "used_bytes": used,
        "winner": label(tuned.winner(form)),
        "status": tuned.choices[form].status,
        "extern_us": timed["extern"].median_us,
        "sliced_us": timed["sliced"].median_us if even else None,
        "masked_us": timed["masked"].median_us if row.masked else None,
        "ours_us": ours.median_us,
        "tbps": used / ours.median_us / 1e6,
        "of_copy": used / ours.median_us / 1e6 / copy_tbps,
        "rounds": len(ours.us),
        "error": ours.error,
        "extern_error": timed["extern"].error,
        "disturbed": any(t.disturbed for t in timed.values()),
    }
    if row.masked:
        ratio = paired_ratio(timed["masked"].us, ours.us)
        found |= {"over_masked": ratio.median, "over_masked_low": ratio.low, "over_masked_high": ratio.high}
    return found


def run_prefill(bench: Bench, rows: Sequence[Prefill]) -> None:
    """Tune and measure prompts that are not in the file, until the time is over."""
    missing = bench.missing("prefill", rows)
    if missing:
        tuned = _tune(bench, missing)
        arena = Arena(bench.shop.target)
        for row in missing:
            if bench.clock.is_over:
                bench.tell("time is over; run again to continue")
                break
            if tuned.is_searched(row.form):
                attempt(bench, "prefill", row.name, lambda row=row: _prefill(arena, row, tuned))  # type: ignore[misc]
    head = ("row", "extern us", "ours us", "best backend", "us", "best / ours", "TFLOP/s", "winner")
    body = [
        (
            row["row"],
            f"{row['extern_us']:.1f}",
            f"{row['ours_us']:.1f}",
            row["best"] or "",
            _text(row["best_us"]),
            "" if row["ratio"] is None else f"{row['ratio']:.3f}",
            f"{row['tflops']:.0f}",
            row["winner"],
        )
        for row in sorted(bench.finished("prefill"), key=lambda r: (r["kind"], r["length"]))
    ]
    print_table(bench, f"Many queries, {DTYPE}, beside each of ATen's backends", head, body)


def _prefill(arena: Arena, row: Prefill, tuned: Tuned) -> dict[str, Any]:
    form = row.form
    usable = _usable(arena, row, backends(form, arena.target, row.skip))
    timed = arena.meet(
        form, [extern(form, arena.target), tuned.contender("ours", form), *usable], seed=SEED, budget_s=0.8
    )
    ours = timed["ours"]
    names = [contender.name for contender in usable]
    best = min(names, key=lambda name: timed[name].median_us, default=None)
    ratio = None if best is None else paired_ratio(timed[best].us, ours.us)
    return {
        **row.facts,
        "winner": label(tuned.winner(form)),
        "status": tuned.choices[form].status,
        "extern_us": timed["extern"].median_us,
        "ours_us": ours.median_us,
        "backends": {name: float(f"{timed[name].median_us:.6g}") for name in names},
        "best": best,
        "best_us": None if best is None else timed[best].median_us,
        "ratio": None if ratio is None else ratio.median,
        "ratio_low": None if ratio is None else ratio.low,
        "ratio_high": None if ratio is None else ratio.high,
        "tflops": flops(form) / ours.median_us / 1e6,
        "rounds": len(ours.us),
        "error": ours.error,
        "extern_error": timed["extern"].error,
        "disturbed": any(t.disturbed for t in timed.values()),
    }


def _usable(arena: Arena, row: Prefill, found: Sequence[Contender]) -> list[Contender]:
    """Return the backends that take these operands here; whether one does is for torch to say."""
    usable = []
    for contender in found:
        try:
            arena.meet(row.form, [extern(row.form, arena.target), contender], seed=SEED, budget_s=0.02)
        except (RuntimeError, ValueError, TuneModelError):
            continue
        usable.append(contender)
    return usable
