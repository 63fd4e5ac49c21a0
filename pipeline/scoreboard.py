"""The final table: per task the winner, its time against the extern's, and its share of the whole."""

from collections.abc import Iterable
from typing import NamedTuple

from rich.console import Console
from rich.table import Table

from tune_model.pipeline.console import time_text
from tune_model.tune.candidate import label
from tune_model.tune.choice import Tuning

__all__ = ["Score", "print_scoreboard", "scores", "step_gain"]


class Score(NamedTuple):
    """One row.

    Attributes:
        label: Of the task.
        winner: Candidate.
        median_us: Its time per call.
        baseline_us: The extern's.
        gain: baseline / winner, with its 95 % interval.
        share: Of the weighted time of all tasks after tuning, 0 to 1.
        status: As in `Choice`.
    """

    label: str
    winner: str
    median_us: float
    baseline_us: float
    gain: tuple[float, float, float]
    share: float
    status: str


def scores(tuning: Tuning) -> list[Score]:
    """Return the rows, largest share first."""
    rows = list(zip(tuning.plan.tasks, tuning.choices, strict=True))
    total = sum(planned.weight * choice.median_us for planned, choice in rows) or 1.0
    made = [
        Score(
            planned.label,
            label(choice.winner),
            choice.median_us,
            choice.baseline_us,
            (choice.baseline_us / choice.median_us if choice.median_us else 1.0, choice.gain_low, choice.gain_high),
            planned.weight * choice.median_us / total,
            choice.status,
        )
        for planned, choice in rows
    ]
    return sorted(made, key=lambda score: -score.share)


def step_gain(tuning: Tuning) -> float:
    """Return the weighted time of all tasks with externs over that with winners."""
    rows = list(zip(tuning.plan.tasks, tuning.choices, strict=True))
    after = sum(planned.weight * choice.median_us for planned, choice in rows)
    before = sum(planned.weight * choice.baseline_us for planned, choice in rows)
    return before / after if after else 1.0


def print_scoreboard(tuning: Tuning, out: Console) -> None:
    """Print the table and one line of totals; tasks where the library stays say `no gain`."""
    table = Table(title="scoreboard", title_justify="left")
    for name in ("task", "winner", "time", "extern", "speedup", "95 % interval", "share", ""):
        table.add_column(name, justify="left" if name in {"task", "winner", ""} else "right", overflow="fold")
    for score in scores(tuning):
        gain, low, high = score.gain
        table.add_row(
            score.label,
            score.winner,
            time_text(score.median_us),
            time_text(score.baseline_us),
            f"{gain:.2f}x" if score.median_us else "-",
            f"{low:.2f} to {high:.2f}" if score.median_us else "-",
            f"{score.share:.1%}" if score.median_us else "-",
            score.status,
        )
    out.print(table)
    kept = sum(choice.status == "no gain" for choice in tuning.choices)
    rejected = _count(reason.reason for choice in tuning.choices for _, reason in choice.rejections)
    measured = sum(choice.median_us > 0 for choice in tuning.choices)
    of = "all tasks" if measured == len(tuning.choices) else f"the {measured} measured"
    out.print(
        f"{len(tuning.choices)} tasks, {kept} keep the library; weighted time of {of} "
        f"{step_gain(tuning):.2f}x faster than with externs alone",
        markup=False,
    )
    disturbed = sum(choice.status == "disturbed" for choice in tuning.choices)
    if disturbed:
        out.print(
            f"{disturbed} tasks keep the library because other processes disturbed their times; tune again with "
            "--recheck on an idle machine",
            markup=False,
        )
    unconfirmed = sum(choice.status == "unconfirmed" for choice in tuning.choices)
    if unconfirmed:
        out.print(
            f"{unconfirmed} tasks keep the library because the run ended before their winner was measured again; run "
            "the same command again to go on",
            markup=False,
        )
    if tuning.repeated:
        out.print(f"{tuning.repeated} disturbed measurements were repeated", markup=False)
    if rejected:
        out.print("rejected candidates: " + ", ".join(f"{n} {reason}" for reason, n in rejected), markup=False)


def _count(reasons: Iterable[str]) -> list[tuple[str, int]]:
    counts: dict[str, int] = {}
    for reason in reasons:
        counts[reason] = counts.get(reason, 0) + 1
    return sorted(counts.items(), key=lambda item: (-item[1], item[0]))
