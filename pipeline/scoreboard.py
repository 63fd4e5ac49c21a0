"""The final tables: per task the winner, its time, the extern's and its share; per grid point sums and whole steps."""

from rich.console import Console
from rich.table import Table

from tune_model.pipeline.console import gain_text, time_text
from tune_model.pipeline.report.facts import ReportFacts, TaskFacts, Totals
from tune_model.pipeline.report.interval import Gain

__all__ = ["print_scoreboard"]


def print_scoreboard(facts: ReportFacts, out: Console, *, repeated: int = 0) -> None:
    """Print the tables and what there is to say about the whole; a task where the library stays says `no gain`.

    Args:
        facts: Of the tuning.
        out: Where to.
        repeated: Disturbed measurements that were taken again.
    """
    table = Table(title="scoreboard", title_justify="left")
    for name in ("task", "winner", "time", "extern", "speedup", "95 % interval", "share", ""):
        table.add_column(name, justify="left" if name in {"task", "winner", ""} else "right", overflow="fold")
    for task in facts.tasks:
        table.add_row(*_row(task))
    out.print(table)
    _print_steps(facts, out)
    for line in _lines(facts, repeated):
        out.print(line, markup=False, soft_wrap=True)


def _row(task: TaskFacts) -> tuple[str, ...]:
    if not task.after_us:
        return (task.label, task.winner, "-", "-", "-", "-", "-", task.status)
    times = time_text(task.after_us), time_text(task.before_us)
    share = f"{task.share:.1%}" if task.status != "disturbed" else "-"
    if task.winner == "aten":
        return (task.label, task.winner, *times, "-", "-", share, f"[dim]{task.status}[/]")
    gain = task.gain
    speedup = f"[green]{gain.ratio:.2f}x[/]" if gain.low > 1.0 else f"{gain.ratio:.2f}x"
    return (task.label, task.winner, *times, speedup, f"{gain.low:.2f} to {gain.high:.2f}", share, task.status)


def _print_steps(facts: ReportFacts, out: Console) -> None:
    """Print what one run of each phase takes at each grid point, as the sum of its tasks and as it was timed whole."""
    table = Table(title="tasks of one step together", title_justify="left")
    for name in ("step", "tuned", "extern", "speedup", "95 % interval", "floor"):
        table.add_column(name, justify="left" if name == "step" else "right")
    whole = Table(title="steps timed as one", title_justify="left")
    for name in ("step", "tuned", "extern", "speedup", "95 % interval"):
        whole.add_column(name, justify="left" if name == "step" else "right")
    for point in facts.points:
        name = f"{point.phase} {point.point}"
        table.add_row(name, *_times(point.after_us, point.before_us, point.gain), time_text(point.floor_us))
        if point.whole is not None:
            whole.add_row(name, *_times(point.whole.after_us, point.whole.before_us, point.whole.gain))
    if any(point.after_us > 0 for point in facts.points):
        out.print(table)
    if whole.row_count:
        out.print(whole)


def _times(after_us: float, before_us: float, gain: Gain) -> tuple[str, str, str, str]:
    return time_text(after_us), time_text(before_us), f"{gain.ratio:.2f}x", f"{gain.low:.2f} to {gain.high:.2f}"


def _lines(facts: ReportFacts, repeated: int) -> list[str]:
    totals = facts.totals
    lines = [_summary(facts, totals)]
    if count := totals.statuses.get("disturbed", 0):
        lines.append(
            f"{count} tasks keep the library because other processes disturbed their times; tune again with --recheck "
            "on an idle machine"
        )
    if count := totals.statuses.get("unconfirmed", 0):
        lines.append(
            f"{count} tasks keep the library because the run ended before their winner was measured again; run the "
            "same command again to go on"
        )
    if repeated:
        lines.append(f"{repeated} disturbed measurements were repeated")
    if facts.rejections:
        counts = ", ".join(f"{rejection.count} {rejection.reason}" for rejection in facts.rejections)
        lines.append(f"rejected candidates: {counts}")
    return lines


def _summary(facts: ReportFacts, totals: Totals) -> str:
    kept = totals.statuses.get("no gain", 0)
    measured = sum(task.after_us > 0 and task.status != "disturbed" for task in facts.tasks)
    of = "all tasks" if measured == totals.tasks else f"the {measured} measured"
    gain = totals.gain
    start = f"{totals.tasks} tasks, {kept} keep the library; weighted time of {of}"
    if not totals.after_us:
        disturbed = totals.statuses.get("disturbed", 0)
        return f"{totals.tasks} tasks, none {'decided: all keep the library' if disturbed else 'measured'}"
    if gain.low <= 1.0:
        return f"{start} {time_text(totals.after_us)}: no gain over externs alone"
    return (
        f"{start} {time_text(totals.before_us)} -> {time_text(totals.after_us)}: "
        f"{gain_text(gain.ratio, 1.0)} ({gain.low:.2f} to {gain.high:.2f}) faster than with externs alone; floor "
        f"{time_text(totals.floor_us)}"
    )
