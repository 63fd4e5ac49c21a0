"""Against `torch.compile` at its best: what its search finds for a shape, as a contender in the same rounds."""

import contextlib
import time
from collections.abc import Iterator, Sequence
from typing import Any, Final

import torch
from bench.arena import Arena, Contender, Run, Setting, extern
from bench.run import Bench, attempt, print_table
from bench.tuned import Tuned, tune_forms
from torch.nn import functional as F  # noqa: N812 - what it is called everywhere

from matmuls.forms import linear_form
from matmuls.shapes import Matmul
from tune_model.runtime.program import Form
from tune_model.tune.candidate import label
from tune_model.tune.measuring.inputs import make_inputs
from tune_model.tune.measuring.interval import paired_ratio

__all__ = ["run_max_autotune"]

SHARD: Final = "max-autotune"
SEED: Final = 20_002
MODE: Final = "max-autotune-no-cudagraphs"
"""The graph is ours: the same kind for every contender."""

_RESERVE_S: Final = 9.0


def run_max_autotune(bench: Bench, rows: Sequence[Matmul]) -> None:
    """Compile and measure what is not in the file, until the time is over."""
    missing = bench.missing(SHARD, rows)
    if missing:
        left_s = bench.clock.left_s
        budget_s = None if left_s is None else max(0.4 * left_s, left_s - _RESERVE_S * len(missing))
        forms = [linear_form(row.m, row.n, row.k) for row in missing]
        tuned = tune_forms(forms, bench.shop, bench.shop.options(budget_s=budget_s), bench.tell)
        arena = Arena(bench.shop.target)
        for row in missing:
            if bench.clock.is_over:
                bench.tell("time is over; run again to continue")
                break
            if tuned.is_searched(linear_form(row.m, row.n, row.k)):
                found = attempt(bench, SHARD, row.name, lambda row=row: _measure(arena, row, tuned))  # type: ignore[misc]
                if found is not None:
                    bench.tell(f"  {row.name}: ratio {found['ratio']:.3f}, {found['peer']}, {found['compile_s']:.1f} s")
    _print(bench)


def _measure(arena: Arena, row: Matmul, tuned: Tuned) -> dict[str, Any]:
    form = linear_form(row.m, row.n, row.k)
    winner = tuned.winner(form)
    started = time.monotonic()
    peer, peer_name, choices = _compile(form, arena.device)
    compile_s = time.monotonic() - started
    contenders = [extern(form, arena.target), tuned.contender("ours", form), peer]
    timed = arena.meet(form, contenders, seed=SEED, budget_s=1.0)
    torch._dynamo.reset()
    theirs, ours = timed["max_autotune"], timed["ours"]
    ratio = paired_ratio(theirs.us, ours.us)
    return {
        "m": row.m,
        "n": row.n,
        "k": row.k,
        "owners": list(row.owners),
        "winner": label(winner),
        "peer": peer_name,
        "peer_choices": choices,
        "compile_s": compile_s,
        "extern_us": timed["extern"].median_us,
        "max_autotune_us": theirs.median_us,
        "ours_us": ours.median_us,
        "ratio": ratio.median,
        "ratio_low": ratio.low,
        "ratio_high": ratio.high,
        "rounds": len(ours.us),
        "error": ours.error,
        "peer_error": theirs.error,
        "disturbed": any(found.disturbed for found in timed.values()),
    }


def _linear(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return F.linear(x, w)


def _compile(form: Form, device: torch.device) -> tuple[Contender, str, int]:
    """Let inductor search on inputs of the form's sizes; returns the contender, its winner's name, and how many ran."""
    import torch._inductor.config as inductor

    torch._dynamo.reset()
    compiled = torch.compile(_linear, mode=MODE, dynamic=False)
    with torch.no_grad(), inductor.patch(autotune_num_choices_displayed=0), _watched() as seen:
        x, w = make_inputs(form, device, SEED)[0]
        for _ in range(3):
            compiled(x, w)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    name, count = seen[-1] if seen else ("no matmul searched", 0)

    def bind(setting: Setting) -> Run:
        sets = setting.sets
        return lambda number: (compiled(sets[number][0], sets[number][1]),)

    return Contender("max_autotune", bind), name, count


@contextlib.contextmanager
def _watched() -> Iterator[list[tuple[str, int]]]:
    """Note the fastest choice of every search; a version without this hook leaves the list empty."""
    seen: list[tuple[str, int]] = []

    def note(timings: Any, *_: Any) -> None:
        if timings:
            best = min(timings, key=lambda choice: timings[choice])
            seen.append((str(getattr(best, "name", best)), len(timings)))

    try:
        from torch._inductor.select_algorithm import add_feedback_saver, clear_feedback_savers
    except ImportError:
        yield seen
        return
    add_feedback_saver(note)
    try:
        yield seen
    finally:
        clear_feedback_savers()


def _print(bench: Bench) -> None:
    head = ("row", "extern us", "max-autotune us", "ours us", "ratio", "95 % interval", "compile s", "their winner")
    body = [
        (
            row["row"],
            f"{row['extern_us']:.2f}",
            f"{row['max_autotune_us']:.2f}",
            f"{row['ours_us']:.2f}",
            f"{row['ratio']:.3f}",
            f"{row['ratio_low']:.3f} to {row['ratio_high']:.3f}",
            f"{row['compile_s']:.1f}",
            row["peer"],
        )
        for row in bench.finished(SHARD)
    ]
    print_table(bench, f"Against torch.compile(mode={MODE!r})", head, body)
