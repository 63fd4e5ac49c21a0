"""Sentences that every form of a report says alike."""

from tune_model.pipeline.console import gain_text, size_text, time_text
from tune_model.pipeline.report.facts import PointFacts, ReportFacts
from tune_model.pipeline.report.interval import Gain

__all__ = [
    "STATUS_MEANINGS",
    "between_tasks",
    "gain_range",
    "left_out",
    "roofs_sentence",
    "subtitle",
    "verdict",
    "whole_steps",
]

STATUS_MEANINGS = {
    "tuned": "the winner beats the plain operators by more than the noise",
    "no gain": "nothing beats the plain operators by more than the noise, so they stay",
    "layout": "chosen for what its weight's layout gains in other tasks",
    "invariant": "one configuration for every size, so that a row does not depend on how many there are",
    "disturbed": "other processes disturbed the times too much to decide, so the plain operators stay; tuning again "
    "with --recheck on an idle machine settles it",
    "unconfirmed": "the run ended before the winner was measured again, so the plain operators stay",
    "not searched": "the budget ended before, so the plain operators stay",
    "failed": "could not be measured, so the plain operators stay",
}


def subtitle(facts: ReportFacts) -> str:
    """Return what was tuned in one line."""
    many = facts.parameters >= 1_000_000
    count = f"{facts.parameters / 1e6:,.4g} M" if many else f"{facts.parameters:,}"
    model = f"{facts.architecture or 'model'}, {count} parameters"
    return f"{model} ({size_text(facts.weight_bytes)} of weights), {facts.task}, {facts.dtype}"


def verdict(facts: ReportFacts) -> str:
    """Return the outcome in one sentence."""
    totals = facts.totals
    gain = totals.gain
    if not totals.after_us:
        return f"No task could be decided, so the plain operators stay everywhere.{left_out(facts)}"
    if gain.low > 1.0:
        outcome = f"{gain_text(gain.ratio, 1.0)} faster than the plain operators ({gain_range(gain)})"
    else:
        outcome = "no gain over the plain operators"
    return (
        f"The workload's tasks take {time_text(totals.after_us)} instead of {time_text(totals.before_us)}: {outcome}. "
        f"At the best rates seen here they would take {time_text(totals.floor_us)}.{left_out(facts)}"
    )


def left_out(facts: ReportFacts) -> str:
    """Say how many tasks are in no sum of times and what to do, after a space; empty when all are."""
    count = facts.totals.statuses.get("disturbed", 0)
    if not count:
        return ""
    return (
        f" {count} tasks whose times other processes disturbed are left out of all sums; tune again with --recheck on "
        "an idle machine."
    )


def whole_steps(facts: ReportFacts) -> str:
    """Say what whole steps gain, from the least to the most of all points; empty when none was timed."""
    timed = [(point, point.whole) for point in facts.points if point.whole is not None]
    timed.sort(key=lambda pair: pair[1].gain.ratio)
    told = [
        f"{gain_text(whole.gain.ratio, 1.0)} ({point.phase} {point.point}: {time_text(whole.after_us)} instead of "
        f"{time_text(whole.before_us)}, {gain_range(whole.gain)})"
        for point, whole in (timed if len(timed) < 2 else (timed[0], timed[-1]))
    ]
    return f"Whole steps, timed as one, gain {' to '.join(told)}." if told else ""


def between_tasks(point: PointFacts) -> str:
    """Return what a whole step takes beyond its tasks: launches, gaps and operators that are not tuned."""
    return "-" if point.whole is None else time_text(point.whole.after_us - point.after_us)


def gain_range(gain: Gain) -> str:
    """Return a gain's interval in words."""
    return f"95 % interval {gain.low:.2f} to {gain.high:.2f}"


def roofs_sentence(facts: ReportFacts) -> str:
    """Say where the floors come from."""
    from tune_model.pipeline.report.plots.roofline import rate_text

    roofs = facts.roofs
    if roofs.bytes_per_us <= 0:
        return "Nothing was timed well enough to say what this machine can do, so there are no floors."
    where = ", out of a cache, since no task is larger" if roofs.from_cache else ""
    memory = f"{rate_text(roofs.bytes_per_us, 'B/s')} by {roofs.memory_task}{where}"
    compute = "; ".join(
        f"{rate_text(rate, 'FLOP/s')} in {dtype} by {roofs.compute_tasks[dtype]}"
        for dtype, rate in roofs.flops_per_us.items()
    )
    return f"Best rates seen in this run: {memory}{'; ' + compute if compute else ''}."
