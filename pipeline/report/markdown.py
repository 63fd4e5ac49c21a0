"""The report as Markdown: the same facts for a pull request, an issue or a terminal."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Final

from tune_model.pipeline.console import gain_text, memory_text, time_text
from tune_model.pipeline.report import words
from tune_model.pipeline.report.facts import ReportFacts, TaskFacts
from tune_model.pipeline.report.interval import Gain

__all__ = ["render_markdown"]

_FASTEST: Final = 5
"""So many candidates of each race are listed; the JSON form has all."""


def render_markdown(facts: ReportFacts) -> str:
    """Return the report; equal facts give equal text."""
    sections = (
        _summary(facts),
        _steps(facts),
        _time(facts),
        _scoreboard(facts),
        _races(facts),
        _rejections(facts),
        _coverage(facts),
        _environment(facts),
    )
    return "\n".join(line for section in sections for line in section)


def _summary(facts: ReportFacts) -> Iterator[str]:
    totals = facts.totals
    yield f"# {_cell(facts.name)} on {_cell(facts.target)}"
    yield ""
    yield _cell(words.subtitle(facts)) + "."
    yield ""
    yield f"**{_cell(words.verdict(facts))}**"
    yield ""
    if whole := words.whole_steps(facts):
        yield _cell(whole)
        yield ""
    statuses = ", ".join(f"{count} {status}" for status, count in totals.statuses.items())
    yield (
        f"{totals.tasks} tasks: {statuses}. {totals.measurements} timings of {totals.candidates} candidates, "
        f"{totals.disturbed} disturbed; {totals.rejected} candidates rejected."
    )
    yield ""
    yield _cell(words.roofs_sentence(facts))
    yield ""


def _steps(facts: ReportFacts) -> Iterator[str]:
    yield "## Steps"
    yield ""
    yield from _table(
        ("phase", "sizes", "plain", "tuned", "floor", "gain", "95 % interval"),
        (
            (p.phase, p.point, time_text(p.before_us), time_text(p.after_us), time_text(p.floor_us), *_gain(p.gain))
            for p in facts.points
        ),
        numbers_from=2,
    )
    timed = [(p, p.whole) for p in facts.points if p.whole is not None]
    if timed:
        yield "Whole steps, timed while tuning; `rest` is what a step takes beyond its tasks:"
        yield ""
        yield from _table(
            ("phase", "sizes", "plain", "tuned", "gain", "95 % interval", "rest"),
            (
                (
                    p.phase,
                    p.point,
                    time_text(whole.before_us),
                    time_text(whole.after_us),
                    *_gain(whole.gain),
                    words.between_tasks(p),
                )
                for p, whole in timed
            ),
            numbers_from=2,
        )
    measured = [(p, step) for p in facts.points for step in p.steps]
    if measured:
        yield "Whole steps, measured by a benchmark:"
        yield ""
        yield from _table(
            ("phase", "sizes", "contender", "median", "20 to 80 %", "against tuned"),
            (
                (
                    p.phase,
                    p.point,
                    step.name,
                    f"{step.median_ms:.3f} ms",
                    f"{step.low_ms:.3f} to {step.high_ms:.3f}",
                    gain_text(step.median_ms, p.steps[0].median_ms),
                )
                for p, step in measured
            ),
            numbers_from=3,
        )


def _time(facts: ReportFacts) -> Iterator[str]:
    total = facts.totals.after_us or 1.0
    yield "## Where the time goes"
    yield ""
    yield from _table(
        ("kind", "tasks", "plain", "tuned", "share"),
        (
            (k.kind, str(k.tasks), time_text(k.before_us), time_text(k.after_us), f"{k.after_us / total:.1%}")
            for k in facts.kinds
        ),
        numbers_from=1,
    )


def _scoreboard(facts: ReportFacts) -> Iterator[str]:
    yield "## Scoreboard"
    yield ""
    yield from _table(
        ("task", "winner", "status", "time", "plain", "gain", "95 % interval", "share", "of roof"),
        (
            (
                t.label,
                t.winner,
                t.status,
                time_text(t.after_us),
                time_text(t.before_us),
                *(("-", "-") if t.status == "disturbed" else _gain(t.gain)),
                f"{t.share:.1%}",
                f"{t.floor_us / t.after_us:.0%} {t.bound}" if t.after_us and t.status != "disturbed" else "-",
            )
            for t in facts.tasks
        ),
        numbers_from=3,
    )


def _races(facts: ReportFacts) -> Iterator[str]:
    yield "## Races"
    yield ""
    yield f"The fastest {_FASTEST} of each; `final` is interleaved with the plain operators."
    yield ""
    for task in facts.tasks:
        yield from _race(task)


def _race(task: TaskFacts) -> Iterator[str]:
    rejected = ", ".join(f"{count} {reason}" for reason, count in task.rejected.items())
    how = "climbed, " if task.footprints else ""
    yield f"**{_cell(task.label)}** ({how}{len(task.race)} timed{'; rejected: ' + rejected if rejected else ''})"
    yield ""
    fastest = sorted(task.race, key=lambda c: (c.final_us is None, c.us))[:_FASTEST]
    yield from _table(
        ("candidate", "first", "final"),
        (
            (c.label, time_text(c.race_us[0]) if c.race_us else "-", time_text(c.final_us) if c.final_us else "-")
            for c in fastest
        ),
        numbers_from=1,
    )
    for step in task.footprints:
        time = time_text(step.at_us) if step.at_us else "out"
        yield f"- {_cell(step.at)} {time}, {step.tried} {step.around} tried: {_cell(step.moved) or 'stays'}"
    if task.footprints:
        yield ""


def _rejections(facts: ReportFacts) -> Iterator[str]:
    yield "## Rejections"
    yield ""
    yield from _table(
        ("reason", "count", "families", "for example"),
        (
            (r.reason, str(r.count), ", ".join(f"{count} {name}" for name, count in r.families.items()), r.example)
            for r in facts.rejections
        ),
    )


def _coverage(facts: ReportFacts) -> Iterator[str]:
    yield "## Coverage"
    yield ""
    yield from _table(
        ("phase", "size", "tuned at", "least", "most"),
        (
            (phase.name, name, ", ".join(map(str, phase.grid.get(name, ()))) or "-", str(least), str(most))
            for phase in facts.phases
            for name, least, most in phase.ranges
        ),
    )
    if facts.missing:
        yield "Asked for, not tuned:"
        yield ""
        yield from _table(
            ("phase", "sizes", "runs", "steps near", "steps plain", "nearest"),
            ((m.phase, m.point, str(m.runs), str(m.near), str(m.plain), m.nearest) for m in facts.missing),
        )
    if facts.skipped:
        yield "Not tuned:"
        yield ""
        yield from _table(
            ("phase", "operator", "count", "why"),
            ((s.program, s.op, str(s.count), s.reason) for s in facts.skipped),
        )


def _environment(facts: ReportFacts) -> Iterator[str]:
    yield "## Environment"
    yield ""
    yield from _table(("", ""), (*facts.environment, ("memory when served", memory_text(facts.memory))))
    for note in facts.notes:
        yield f"- {_cell(note)}"
    if facts.notes:
        yield ""


def _gain(gain: Gain) -> tuple[str, str]:
    return gain_text(gain.ratio, 1.0), f"{gain.low:.2f} to {gain.high:.2f}"


def _table(names: Sequence[str], rows: Iterable[Sequence[str]], numbers_from: int | None = None) -> Iterator[str]:
    """Yield a table and an empty line; columns from `numbers_from` on stand to the right."""
    yield "| " + " | ".join(names) + " |"
    first = len(names) if numbers_from is None else numbers_from
    yield "|" + "|".join("---" if i < first else "---:" for i in range(len(names))) + "|"
    for row in rows:
        yield "| " + " | ".join(_cell(text) for text in row) + " |"
    yield ""


def _cell(text: str) -> str:
    """Return text that cannot leave its cell or become markup."""
    flat = " ".join(text.split())
    for character in "\\|`*_<>[]":
        flat = flat.replace(character, "\\" + character)
    return flat
