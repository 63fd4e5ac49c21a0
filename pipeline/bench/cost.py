"""What tuning took and found, as a benchmark result."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from tune_model.pipeline.bench.result import BenchmarkResult, command_text, library_versions, today, write_result

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tune_model.pipeline.report.facts import ReportFacts, TaskFacts
    from tune_model.tune.choice import Tuning

__all__ = ["write_cost"]


def write_cost(
    path: Path, facts: "ReportFacts", tuning: "Tuning", arguments: "Sequence[str]", *, complete: bool
) -> None:
    """Write one row per task, whenever it was measured, and what this run took.

    `builds`, `measurements`, `repeated` (of these, taken again since something disturbed them) and `tune_s` (wall
    seconds of racing, tracing left out) are of this run alone: where records held some tasks already they are less than
    the whole costs. `complete` is 0 when the run ended before every task was searched.

    Args:
        path: The result file; an old one is replaced.
        facts: The report's.
        tuning: What was tuned in this run.
        arguments: The command line.
        complete: Whether every task was searched.
    """
    summary = {
        "tasks": facts.totals.tasks,
        "builds": tuning.builds,
        "measurements": tuning.measured,
        "repeated": tuning.repeated,
        "complete": int(complete),
        "tune_s": round(tuning.seconds, 1),
        **{status.replace(" ", "_"): count for status, count in facts.totals.statuses.items()},
    }
    rows = [_row(task) for task in facts.tasks]
    command = command_text(arguments)
    write_result(
        path,
        BenchmarkResult(f"{facts.name}-tuning", facts.target, library_versions(), today(), command, rows, summary),
    )


def _row(task: "TaskFacts") -> dict[str, Any]:
    return {
        "task": task.label,
        "winner": task.winner,
        "median_us": task.after_us,
        "extern_us": task.before_us,
        "gain_low": task.gain.low,
        "gain_high": task.gain.high,
        "share": task.share,
        "status": task.status,
        "candidates_timed": len(task.race),
        "rejected": task.rejected,
    }
