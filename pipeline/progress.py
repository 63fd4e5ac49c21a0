"""The tuner's events for a person or a log: a live bar on a terminal, one line per task elsewhere, or JSON."""

import time
from collections.abc import Callable
from types import TracebackType
from typing import Self

import click
import msgspec
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from tune_model.pipeline.console import console, gain_text, time_text
from tune_model.tune.candidate import label
from tune_model.tune.events import (
    CandidateDone,
    ChoiceConfirmed,
    Event,
    RecordsDamaged,
    StepTimed,
    StepTurned,
    TaskDone,
    TaskStarted,
    TuneFinished,
    TuneStarted,
)

__all__ = ["Eta", "JsonReport", "PlainReport", "Report", "TerminalReport", "make_report"]


class Eta:
    """Remaining time: the tuner's estimate at first, then more and more the pace of what was really measured.

    The heaviest tasks come first and take longest, so their pace alone would promise far too much time.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        self.started = clock()
        self.estimate_s = 0.0
        self.open = 0
        self.done = 0

    def start(self, candidates: int, estimate_s: float) -> None:
        """Begin with what is to be measured."""
        self.started, self.open, self.estimate_s = self.clock(), candidates, estimate_s

    def step(self, *, replayed: bool) -> None:
        """Count a candidate; replayed ones cost nothing and say nothing about the pace."""
        self.open = max(self.open - 1, 0)
        self.done += not replayed

    def remaining_s(self) -> float:
        """Return the seconds left."""
        elapsed = self.clock() - self.started
        estimated = max(self.estimate_s - elapsed, 0.0)
        if not self.done or not self.open:
            return estimated if self.open else 0.0
        done = self.done / (self.done + self.open)
        return done * (elapsed / self.done * self.open) + (1.0 - done) * estimated


class Report:
    """Receives the events of one tuning run. A context manager; `__call__` is what `tune` reports to."""

    def __init__(self) -> None:
        self.eta = Eta()
        self.labels: dict[str, str] = {}
        self.tasks = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        return None

    def __call__(self, event: Event) -> None:
        """Take an event: keep the books, then show it."""
        match event:
            case TuneStarted():
                self.tasks = event.tasks
                self.eta.start(event.candidates, event.estimate_s)
            case TaskStarted():
                self.labels[event.task] = event.label
            case CandidateDone():
                self.eta.step(replayed=event.replayed)
            case _:
                pass
        self.show(event)

    def show(self, event: Event) -> None:
        """Show an event."""
        raise NotImplementedError


class JsonReport(Report):
    """One JSON object per event and line on standard output."""

    def show(self, event: Event) -> None:
        """Write the event."""
        click.echo(msgspec.json.encode(event).decode())


class PlainReport(Report):
    """One line per task, for logs."""

    def __init__(self, out: Console) -> None:
        super().__init__()
        self.out = out

    def show(self, event: Event) -> None:
        """Print what deserves a line."""
        line = self.line(event)
        if line:
            self.out.print(line, markup=False, soft_wrap=True)

    def line(self, event: Event) -> str:
        """Return an event's line; empty for those that have none."""
        match event:
            case TuneStarted():
                stale = f", {event.stale} stale" if event.stale else ""
                return (
                    f"{event.tasks} tasks ({event.replayed} replayed from records{stale}), "
                    f"{event.candidates} candidates, about {event.estimate_s:.0f} s"
                )
            case TaskDone(best_us=0):
                return f"[{event.index + 1}/{self.tasks}] {self.labels.get(event.task, event.task)}: {event.status}"
            case TaskDone():
                how = "replayed" if event.replayed else f"{event.seconds:.1f} s"
                left = self.eta.remaining_s()
                return (
                    f"[{event.index + 1}/{self.tasks}] {self.labels.get(event.task, event.task)}: "
                    f"{label(event.best)} {time_text(event.best_us)}, extern {time_text(event.baseline_us)}, "
                    f"{gain_text(event.baseline_us, event.best_us)} ({event.status}; {how}; {left:.0f} s left)"
                )
            case ChoiceConfirmed(held=False):
                return (
                    f"{self.labels.get(event.task, event.task)}: {label(event.candidate)} did not hold: {event.detail}"
                )
            case StepTimed(task="") | StepTurned():
                return f"{event.step}: the whole step {_step_text(event)}"
            case RecordsDamaged():
                return f"records were damaged: set aside as {event.moved_to}, {event.rescued} rows rescued"
            case TuneFinished():
                early = f", stopped early: {event.stopped}" if event.stopped else ""
                return f"{event.builds} builds, {event.measured} measurements in {event.seconds:.1f} s{early}"
            case _:
                return ""


def _step_text(event: StepTimed | StepTurned) -> str:
    before = time_text(event.baseline_us)
    if isinstance(event, StepTurned):
        launches = f"other launches of {len(event.tasks)} kernels"
        return f"{time_text(event.median_us)} with {launches}, {before} before, {event.gain:.3f}x"
    return f"{time_text(event.median_us)}, with torch's operators {before}, {event.gain:.2f}x"


class TerminalReport(PlainReport):
    """A live bar: tasks done, the candidate at hand, best so far against the extern, time left."""

    def __init__(self, out: Console) -> None:
        super().__init__(out)
        self.progress = Progress(
            TextColumn("[bold]{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[left]}"),
            TextColumn("{task.fields[detail]}"),
            console=out,
            transient=True,
        )
        self.bar: TaskID | None = None

    def __enter__(self) -> Self:
        self.progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.progress.stop()

    def show(self, event: Event) -> None:
        """Move the bar; print the lines that last."""
        if isinstance(event, TuneStarted):
            self.bar = self.progress.add_task("tuning", total=event.candidates, left="", detail="")
        super().show(event)
        if self.bar is None:
            return
        left = f"{self.eta.remaining_s():.0f} s left"
        if isinstance(event, TaskStarted):
            self.progress.update(self.bar, description=event.label)
        elif isinstance(event, ChoiceConfirmed):
            detail = f"{label(event.candidate)}  {event.gain:.2f}x of extern"
            what = f"measuring winners again, {event.index + 1} of {event.total}"
            self.progress.update(self.bar, description=what, detail=detail)
        elif isinstance(event, StepTimed):
            without = f"without {self.labels.get(event.task, event.task)}" if event.task else "as a whole"
            self.progress.update(self.bar, description=f"timing {event.step}", detail=f"{event.gain:.2f}x {without}")
        elif isinstance(event, CandidateDone):
            detail = f"{label(event.candidate)}  best {gain_text(event.baseline_us, event.best_us)} of extern"
            self.progress.update(self.bar, advance=1, left=left, detail=detail)


def make_report(*, as_json: bool) -> Report:
    """Choose how events are shown: JSON when asked for, a live bar on a terminal, else plain lines."""
    if as_json:
        return JsonReport()
    out = console(error=True)
    return TerminalReport(out) if out.is_terminal else PlainReport(out)
