"""The report as one HTML page that needs nothing else: no network, no files beside it, no libraries.

Text from an artifact is escaped by the template; a content security policy keeps the page from loading anything.
"""

from typing import Final

from jinja2 import Environment, PackageLoader, StrictUndefined

from tune_model.pipeline.console import gain_text, memory_text, size_text, time_text
from tune_model.pipeline.report import words
from tune_model.pipeline.report.facts import ReportFacts, TaskFacts
from tune_model.pipeline.report.plots.race import draw_race, family_classes
from tune_model.pipeline.report.plots.roofline import KIND_CLASSES, draw_roofline, rate_text

__all__ = ["render_html"]

_LARGEST: Final = 14
"""So many tasks have a bar of their own where the time goes; the rest share one."""


def render_html(facts: ReportFacts) -> str:
    """Return the page; equal facts give equal text."""
    environment = Environment(
        loader=PackageLoader("tune_model.pipeline.report", "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters |= {
        "time": time_text,
        "bytes": size_text,
        "percent": lambda share: f"{share:.1%}",
        "status": lambda status: status.partition(":")[0],
        "width": lambda share: f"{100 * min(max(share, 0.0), 1.0):.2f}%",
    }
    classes = family_classes(facts.tasks)
    rest = _rest(facts.tasks[_LARGEST:])
    return environment.get_template("report.html.jinja").render(
        facts=facts,
        words=words,
        gain_text=gain_text,
        memory_text=memory_text,
        rate_text=rate_text,
        kinds=KIND_CLASSES,
        families=classes,
        races={task.key: draw_race(task, classes) for task in facts.tasks},
        roofline_wide=draw_roofline(facts, 900, 430, "wide"),
        roofline_narrow=draw_roofline(facts, 360, 380, "narrow"),
        largest=facts.tasks[:_LARGEST],
        rest=rest,
        longest_task_us=max([*(max(t.before_us, t.after_us) * t.weight for t in facts.tasks), rest["longest_us"]])
        or 1.0,
        longest_us=max((max(p.before_us, p.after_us) for p in facts.points), default=1.0) or 1.0,
        statuses=[status for status in words.STATUS_MEANINGS if status in facts.totals.statuses],
    )


def _rest(tasks: tuple[TaskFacts, ...]) -> dict[str, float]:
    """Sum up the smaller tasks: their weighted times with the plain operators and tuned, and their share."""
    before, after = sum(t.weight * t.before_us for t in tasks), sum(t.weight * t.after_us for t in tasks)
    share = sum(t.share for t in tasks)
    return {
        "count": len(tasks),
        "before_us": before,
        "after_us": after,
        "share": share,
        "longest_us": max(before, after),
    }
