"""The roofline: every task by its arithmetic intensity and the rate it reached, under the best rates seen."""

import math
from typing import Final

from tune_model.pipeline.console import time_text
from tune_model.pipeline.report.facts import ReportFacts, TaskFacts
from tune_model.pipeline.report.plots.scale import LogScale, log_scale
from tune_model.pipeline.report.plots.svg import circle, document, line, path, text

__all__ = ["KIND_CLASSES", "draw_roofline", "rate_text"]

KIND_CLASSES: Final = {"matmul": "k0", "attention": "k1", "reduction": "k2", "pointwise": "k3"}
_LEFT, _TOP, _RIGHT, _BOTTOM = 58.0, 16.0, 14.0, 40.0


def rate_text(per_us: float, unit: str) -> str:
    """Return a rate given per microsecond: `4.2 TB/s`."""
    value = per_us * 1e6
    for prefix in ("", "k", "M", "G", "T"):
        if value < 1000:
            return f"{value:.3g} {prefix}{unit}"
        value /= 1000
    return f"{value:.3g} P{unit}"


def draw_roofline(facts: ReportFacts, width: float, height: float, class_: str) -> str:
    """Draw all tasks that compute something.

    A dot's area is the task's share of the time; a thin line leads to it from where the plain operators are.
    """
    tasks = [t for t in facts.tasks if t.flops > 0 and t.size_bytes > 0 and t.after_us > 0]
    intensities = [t.flops / t.size_bytes for t in tasks]
    rates = [t.flops / us for t in tasks for us in (t.after_us, t.before_us) if us > 0]
    roofs = sorted(facts.roofs.flops_per_us.items(), key=lambda item: -item[1])
    x = log_scale(intensities, _LEFT, width - _RIGHT)
    y = log_scale([*rates, *(rate for _, rate in roofs)], height - _BOTTOM, _TOP)
    parts = [*_axes(x, y, width, height), *_roofs(facts, roofs, x, y)]
    for task in sorted(tasks, key=lambda t: -t.share):
        parts += _dot(task, x, y)
    label = f"Roofline of {len(tasks)} tasks: operations per second over operations per byte."
    return document(width, height, parts, label, class_)


def _axes(x: LogScale, y: LogScale, width: float, height: float) -> list[str]:
    bottom = height - _BOTTOM
    parts: list[str] = []
    for value in x.ticks():
        at = x.place(value)
        parts += [line(at, _TOP, at, bottom, "grid"), text(at, bottom + 16, f"{value:g}", "tick", "middle")]
    for value in y.ticks():
        at = y.place(value)
        parts += [line(_LEFT, at, width - _RIGHT, at, "grid")]
        parts += [text(_LEFT - 6, at + 4, rate_text(value, "").rstrip(), "tick", "end")]
    parts.append(text(_LEFT, height - 6, "operations per byte moved", "axis"))
    parts.append(text(4, _TOP - 4, "operations per second", "axis"))
    return parts


def _roofs(facts: ReportFacts, roofs: list[tuple[str, float]], x: LogScale, y: LogScale) -> list[str]:
    parts: list[str] = []
    slope = facts.roofs.bytes_per_us
    highest = roofs[0][1] if roofs else y.high
    if slope > 0:
        ends = (max(x.low, y.low / slope), min(x.high, highest / slope))
        if ends[0] < ends[1]:
            parts.append(path([(x.place(v), y.place(v * slope)) for v in ends], "roof"))
            # The name stands along the line, a little above its middle.
            middle = math.sqrt(ends[0] * ends[1])
            at = (x.place(middle) - 6, y.place(middle * slope) - 6)
            parts.append(text(*at, rate_text(slope, "B/s"), "rooflabel", "end"))
    for dtype, rate in roofs:
        start = max(x.low, min(rate / slope if slope > 0 else x.low, x.high))
        parts.append(path([(x.place(start), y.place(rate)), (x.place(x.high), y.place(rate))], "roof"))
        parts.append(
            text(x.place(x.high), y.place(rate) - 6, f"{rate_text(rate, 'FLOP/s')} {dtype}", "rooflabel", "end")
        )
    return parts


def _dot(task: TaskFacts, x: LogScale, y: LogScale) -> list[str]:
    at = x.place(task.flops / task.size_bytes)
    after = y.place(task.flops / task.after_us)
    parts: list[str] = []
    if task.before_us > 0 and abs((before := y.place(task.flops / task.before_us)) - after) > 1:
        parts.append(line(at, before, at, after, "lift"))
        parts.append(circle(at, before, 1.8, "was"))
    radius = 3.0 + 14.0 * math.sqrt(task.share)
    title = (
        f"{task.label}\n{task.winner}\n{time_text(task.after_us)}, plain operators {time_text(task.before_us)}, "
        f"{task.gain.ratio:.2f}x, {task.share:.1%} of the time\n"
        f"{rate_text(task.flops / task.after_us, 'FLOP/s')}, {rate_text(task.size_bytes / task.after_us, 'B/s')}"
    )
    return [*parts, circle(at, after, radius, f"dot {KIND_CLASSES.get(task.kind, 'k4')}", title)]
