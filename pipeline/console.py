"""Printing for people: one console, and numbers as text."""

from typing import TYPE_CHECKING

from rich.console import Console

if TYPE_CHECKING:
    from tune_model.package.memory import MemoryPlan

__all__ = ["console", "count_text", "gain_text", "memory_text", "size_text", "time_text"]


def console(*, error: bool = False) -> Console:
    """Return a console; without a terminal it is plain and 140 columns wide so that tables stay whole in logs."""
    made = Console(stderr=error, highlight=False)
    return made if made.is_terminal else Console(stderr=error, highlight=False, width=140, no_color=True)


def count_text(count: int, noun: str) -> str:
    """Return `1 part`, `3 parts`."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def size_text(size_bytes: float) -> str:
    """Return `7.3 MB`: powers of 1000, three digits."""
    for unit in ("B", "kB", "MB", "GB"):
        if size_bytes < 999.5:  # from there on three digits would say 1e+03
            return f"{size_bytes:.3g} {unit}"
        size_bytes /= 1000
    return f"{size_bytes:.3g} TB"


def time_text(time_us: float) -> str:
    """Return a duration given in microseconds with the unit that fits: `14.2 us`, `3.57 ms`; 0 is one not taken."""
    if time_us <= 0:
        return "-"
    if time_us < 999.5:
        return f"{time_us:.3g} us"
    return f"{time_us / 1e3:.3g} ms" if time_us < 999.5e3 else f"{time_us / 1e6:.3g} s"


def gain_text(baseline_us: float, median_us: float) -> str:
    """Return a speedup: `1.42x`."""
    return f"{baseline_us / median_us:.2f}x" if median_us > 0 else "-"


def memory_text(plan: "MemoryPlan") -> str:
    """Say what the device will hold when an artifact is served."""
    parts = [f"weights {size_text(plan.weights)}"]
    if plan.rows:
        parts.append(f"cache {size_text(plan.cache)} ({plan.rows} rows of {plan.slots} slots)")
    parts.append(f"workspace {size_text(plan.workspace)}")
    if plan.graphs:
        parts.append(f"{plan.graphs} step graphs with {size_text(plan.graph_outputs)} of logits")
    return f"{', '.join(parts)}; together {size_text(plan.total)}"
