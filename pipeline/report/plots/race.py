"""A race: every candidate of a task in the order first timed, its time, and the best so far."""

from collections.abc import Mapping, Sequence

from tune_model.pipeline.console import time_text
from tune_model.pipeline.report.facts import CandidateFacts, TaskFacts
from tune_model.pipeline.report.plots.scale import LogScale, log_scale
from tune_model.pipeline.report.plots.svg import circle, document, element, line, number, path, text

__all__ = ["draw_race", "family_classes"]

_WIDTH, _HEIGHT = 340.0, 168.0
_LEFT, _TOP, _RIGHT, _BOTTOM = 48.0, 10.0, 10.0, 20.0
_COLOURS = 8


def family_classes(tasks: Sequence[TaskFacts]) -> dict[str, str]:
    """Give each family that took part a colour: the plain operators theirs, the others by how often they won."""
    wins: dict[str, int] = {}
    for task in tasks:
        for name in sorted({c.family for c in task.race}):
            wins[name] = wins.get(name, 0) + (task.family == name)
    others = sorted((name for name in wins if name != "aten"), key=lambda name: (-wins[name], name))
    return {"aten": "f-aten"} | {name: f"f{number % _COLOURS}" for number, name in enumerate(others)}


def draw_race(task: TaskFacts, classes: Mapping[str, str]) -> str:
    """Draw a race; empty text when nothing was timed.

    A dot is a candidate's first timing, all of which compare; a ring is its time in the final, where the machine is in
    another state; the diamond is the winner's, measured again after it. The dashed line is the plain operators' time
    beside it. The thin line is the best so far, or in a climb the path that was taken.
    """
    race = [c for c in task.race if c.us > 0]
    if not race:
        return ""
    times = [us for c in race for us in (_first(c), c.us)] + ([task.before_us] if task.before_us > 0 else [])
    y = log_scale(times, _HEIGHT - _BOTTOM, _TOP)
    step = (_WIDTH - _LEFT - _RIGHT) / max(len(race), 2)
    places = [_LEFT + step * (i + 0.5) for i in range(len(race))]
    parts = _axes(y, len(race))
    if task.before_us > 0:
        parts.append(line(_LEFT, y.place(task.before_us), _WIDTH - _RIGHT, y.place(task.before_us), "extern"))
    parts += _paths(task, dict(zip((c.label for c in race), zip(places, race, strict=True), strict=True)), y)
    if not task.footprints:
        parts.append(_best_so_far(race, places, y))
    for candidate, x in zip(race, places, strict=True):
        parts += _candidate(candidate, task, x, y, classes)
    label = f"{len(race)} candidates for {task.label}: microseconds in the order timed."
    return document(_WIDTH, _HEIGHT, parts, label, "race")


def _first(candidate: CandidateFacts) -> float:
    return candidate.race_us[0] if candidate.race_us else candidate.us


def _axes(y: LogScale, count: int) -> list[str]:
    parts: list[str] = []
    for value in y.ticks(5):
        at = y.place(value)
        parts.append(line(_LEFT, at, _WIDTH - _RIGHT, at, "grid"))
        parts.append(text(_LEFT - 5, at + 4, time_text(value), "tick", "end"))
    parts.append(text(_LEFT, _HEIGHT - 5, "1", "tick"))
    parts.append(text(_WIDTH - _RIGHT, _HEIGHT - 5, f"{count} in the order timed", "tick", "end"))
    return parts


def _best_so_far(race: Sequence[CandidateFacts], places: Sequence[float], y: LogScale) -> str:
    points: list[tuple[float, float]] = []
    best = float("inf")
    for candidate, x in zip(race, places, strict=True):
        if _first(candidate) < best:
            if points:
                points.append((x, points[-1][1]))
            best = _first(candidate)
            points.append((x, y.place(best)))
    points.append((_WIDTH - _RIGHT, points[-1][1]))
    return path(points, "best")


def _paths(task: TaskFacts, places: Mapping[str, tuple[float, CandidateFacts]], y: LogScale) -> list[str]:
    """Draw every descent as a line through the candidates it stood on."""
    walks: dict[tuple[str, int], list[str]] = {}
    for step in task.footprints:
        walk = walks.setdefault((step.family, step.descent), [step.at])
        if step.to:
            walk.append(step.to)
    parts: list[str] = []
    for walk in walks.values():
        found = [places[name] for name in walk if name in places]
        parts.append(path([(x, y.place(_first(candidate))) for x, candidate in found], "walk"))
    return parts


def _candidate(
    candidate: CandidateFacts, task: TaskFacts, x: float, y: LogScale, classes: Mapping[str, str]
) -> list[str]:
    first, last = y.place(_first(candidate)), y.place(candidate.us)
    colour = classes.get(candidate.family, "f-aten")
    times = ", ".join(time_text(us) for us in candidate.race_us)
    final = f"; in the final {time_text(candidate.final_us)}" if candidate.final_us is not None else ""
    guard = f"; again {time_text(candidate.guard_us)}" if candidate.guard_us is not None else ""
    title = f"{candidate.label}\n{times}{final}{guard}{'; disturbed' if candidate.disturbed else ''}"
    parts = [circle(x, first, 2.2, colour, title)]
    if candidate.final_us is None and candidate.label != task.winner:
        return parts
    parts.append(line(x, first, x, last, "lift"))
    if candidate.label == task.winner:
        diamond = f"M{number(x)} {number(last - 6)}l6 6l-6 6l-6-6z"
        return [*parts, element("path", title=f"winner: {title}", d=diamond, class_=f"won {colour}")]
    return [*parts, circle(x, last, 4.2, f"ring {colour}", title)]
