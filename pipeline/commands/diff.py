"""`tune-model diff OLD NEW`: what changed between two artifacts, and a gate for releases."""

import re
from typing import TYPE_CHECKING

import click

from tune_model.pipeline.options import artifact_path, part_option

if TYPE_CHECKING:
    from rich.console import Console

    from tune_model.package.diff import ArtifactDiff, TaskDiff
    from tune_model.package.read import ChoosePart

__all__ = ["command"]

EXIT_SLOWER = 5

HELP = """Compare two artifacts of one model: choices, times, versions.

On one machine the plain operators of both tunings tell how the machine drifted, and that is taken out: beside each
winner's own operators or beside all of them, whichever way more tasks agree. Between machines, drivers or torch
versions times are compared as they are. Runs nothing.

\b
  tune-model diff old.tuned new.tuned
  tune-model diff old.tuned new.tuned --fail-if-slower 3%      a release gate: exits 5 when it is slower
  tune-model diff old.tuned new.tuned --json | jq .slowdown

--fail-if-slower looks at the weighted time of all tasks, and at every task with 1 % of it or more. Slower means that
the estimate exceeds the limit and the difference is beyond the noise of both measurements. It fails as well when less
than 90 % of the weighted time could be compared.
"""


def _limit(_ctx: click.Context, _parameter: click.Parameter, value: str | None) -> float | None:
    if value is None:
        return None
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*%", value.strip())
    if match is None:
        msg = f"is {value!r}; expected a percentage such as 3% or 0.5%"
        raise click.BadParameter(msg)
    return float(match[1]) / 100


@click.command("diff", help=HELP)
@click.argument("old_path", metavar="OLD", callback=artifact_path)
@click.argument("new_path", metavar="NEW", callback=artifact_path)
@part_option
@click.option(
    "--fail-if-slower",
    "limit",
    metavar="PERCENT",
    default=None,
    callback=_limit,
    help="Exit with 5 when NEW is slower by more than this: 3%.",
)
@click.option("--all", "show_all", is_flag=True, help="List every task, not only those that changed.")
@click.option("--json", "as_json", is_flag=True, help="Print the comparison as JSON.")
def command(
    old_path: str, new_path: str, part: "ChoosePart | None", limit: float | None, show_all: bool, as_json: bool
) -> int:
    """Open both, compare, print."""
    import msgspec

    from tune_model.package.diff import diff_artifacts, slower_than
    from tune_model.package.read import open_artifact
    from tune_model.pipeline.console import console

    diff = diff_artifacts(open_artifact(old_path, part), open_artifact(new_path, part))
    slower = () if limit is None else slower_than(diff, limit)
    if as_json:
        click.echo(msgspec.json.format(msgspec.json.encode(diff)).decode())
    else:
        print_diff(diff, console(), show_all=show_all)
    for what in slower:
        click.echo(f"fails --fail-if-slower {limit:.2%}: {what}", err=True)
    return EXIT_SLOWER if slower else 0


def print_diff(diff: "ArtifactDiff", out: "Console", *, show_all: bool = False) -> None:
    """Print a comparison for people."""
    from rich.table import Table

    from tune_model.pipeline.console import time_text

    for fact in diff.changed:
        out.print(f"{fact.field}: {fact.old} -> {fact.new}", markup=False, soft_wrap=True)
    changed = [t for t in diff.tasks if t.verdict in {"slower", "faster"} or t.old_winner != t.new_winner]
    shown = diff.tasks if show_all else changed
    if shown:
        table = Table(title="tasks" if show_all else "tasks that changed", title_justify="left")
        for name in ("task", "old winner", "new winner", "old", "new", "change", "95 % interval", "share", ""):
            left = name in {"task", "old winner", "new winner", ""}
            table.add_column(name, justify="left" if left else "right", overflow="fold")
        for task in shown:
            change, interval = _change(task)
            new_winner = "the same" if task.new_winner == task.old_winner else task.new_winner
            times = time_text(task.old_us), time_text(task.new_us)
            table.add_row(
                task.label, task.old_winner, new_winner, *times, change, interval, f"{task.share:.1%}", task.verdict
            )
        out.print(table)
    for names, where in ((diff.only_old, "old"), (diff.only_new, "new")):
        for name in names:
            out.print(f"only in the {where} artifact: {name}", markup=False, soft_wrap=True)
    low, high = diff.slowdown.bounds()
    drift = f"; the plain operators, the machine's drift, {_percent(diff.drift)}" if diff.same_machine else ""
    corrected = ", corrected for drift" if diff.same_machine else ", on other machines or versions: times as they are"
    untimed = sum(task.slowdown is None for task in diff.tasks)
    unchanged = sum(task.slowdown is not None for task in diff.tasks if task not in changed)
    if untimed:
        out.print(f"{untimed} tasks were disturbed or not timed in one of the two and are not compared")
    if diff.compared < 1.0:
        out.print(f"compared: {diff.compared:.1%} of the weighted time")
    out.print(
        f"{len(diff.tasks)} tasks in both, {unchanged} without a change: "
        f"weighted time {time_text(diff.old_us)} -> {time_text(diff.new_us)}{drift}\n"
        f"change {_percent(diff.slowdown.ratio)} ({_percent(low)} to {_percent(high)}){corrected}",
        markup=False,
        soft_wrap=True,
    )


def _change(task: "TaskDiff") -> tuple[str, str]:
    if task.slowdown is None:
        return "-", "-"
    low, high = task.slowdown.bounds()
    return _percent(task.slowdown.ratio), f"{_percent(low)} to {_percent(high)}"


def _percent(ratio: float) -> str:
    """Return a ratio of times as a change: `+5.0 %` is slower."""
    return f"{100 * (ratio - 1.0):+.1f} %"
