"""What tuning costs: every distinct matmul of Llama-3-8B with nothing in the records and no kernel built."""

import shutil
from typing import Any, Final

import msgspec
from bench.run import Bench, attempt, print_table
from bench.tuned import Shop, tune_forms

from matmuls.forms import llama_forms
from tune_model.tune.candidate import Candidate
from tune_model.tune.records.database import Records, parse_rows

__all__ = ["DECODE", "PREFILL", "run_llama_tuning"]

SHARD: Final = "llama-tuning"
NAME: Final = "decode 1 8 16 64, prefill 512 2048"
DECODE: Final = (1, 8, 16, 64)
PREFILL: Final = (512, 2048)


def run_llama_tuning(bench: Bench, scale: int = 1) -> None:
    """Tune with fresh records and a fresh store; then give both to the other shards."""
    if bench.wants(SHARD, NAME):
        attempt(bench, SHARD, NAME, lambda: _measure(bench, scale))
    head = ("tasks", "seconds", "builds", "measurements", "candidates", "per second", "build processes", "")
    keys = ("tasks", "seconds", "builds", "measurements", "candidates", "candidates_per_s", "workers", "row")
    body = [tuple(str(row[key]) for key in keys) for row in bench.finished(SHARD)]
    print_table(bench, "Tuning all matmuls of Llama-3-8B", head, body)


def _measure(bench: Bench, scale: int) -> dict[str, Any]:
    folder = bench.shop.folder / "fresh"
    shutil.rmtree(folder, ignore_errors=True)
    shop = msgspec.structs.replace(bench.shop, folder=folder)
    forms = llama_forms(DECODE, PREFILL, scale)
    tuned = tune_forms(forms, shop, shop.options(), bench.tell)
    _hand_over(shop, bench.shop)
    choices = tuned.tuning.choices
    timed: set[tuple[str, Candidate]] = {(c.task, m.candidate) for c in choices for m in c.measurements}
    for form in forms:
        tuned.winner(form)  # a total without all of them would be no total
    return {
        "tasks": len(choices),
        "seconds": tuned.seconds,
        "builds": tuned.tuning.builds,
        "measurements": tuned.tuning.measured,
        "candidates": len(timed),
        "candidates_per_s": len(timed) / tuned.seconds,
        "seconds_per_task": tuned.seconds / len(choices),
        "no_gain": sum(choice.status == "no gain" for choice in choices),
        "effort": str(shop.effort),
        "workers": shop.workers,
    }


def _hand_over(fresh: Shop, shared: Shop) -> None:
    """Merge records and kernels into the shared folder, which saves the other shards these races."""
    records = Records(shared.options().records_path)
    found = Records(fresh.options().records_path)
    try:
        records.merge(parse_rows(found.export()))
    finally:
        found.close()
        records.close()
    shutil.copytree(fresh.options().kernels_path, shared.options().kernels_path, dirs_exist_ok=True)
