"""Tuning a list of forms with the project's tuner, and its choices by form."""

import time
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from bench.arena import Contender, kernel_contender
from bench.plans import plan_of
from tune_model.runtime.errors import TuneModelError
from tune_model.runtime.kernel import Kernel
from tune_model.runtime.program import Form
from tune_model.tune.candidate import Candidate, Effort, label
from tune_model.tune.choice import Choice, Tuning
from tune_model.tune.events import Event, TaskDone
from tune_model.tune.options import TuneOptions
from tune_model.tune.target import Target
from tune_model.tune.tuner import tune

__all__ = ["Shop", "Tuned", "UntunedError", "tune_forms"]


class UntunedError(TuneModelError):
    """The tuner has no choice for a form."""


class Shop(msgspec.Struct, frozen=True):
    """Where and how to tune.

    Attributes:
        target: The machine.
        folder: Records and built kernels live here, and survive between runs.
        effort: For everything but the exhaustive race.
        workers: Build processes.
        isolate: Measure in a process of its own.
    """

    target: Target
    folder: Path
    effort: Effort = Effort.BALANCED
    workers: int = 1
    isolate: bool = True

    def options(
        self, records: str = "records", *, budget_s: float | None = None, effort: Effort | None = None
    ) -> TuneOptions:
        """Return the tuner's options with records under a name of their own."""
        return TuneOptions(
            records_path=self.folder / f"{records}.sqlite",
            kernels_path=self.folder / "kernels",
            effort=effort or self.effort,
            budget_s=budget_s,
            build_workers=self.workers,
            isolate=self.isolate,
        )


class Tuned(msgspec.Struct, frozen=True):
    """The choices of one tuning by form.

    Attributes:
        tuning: As the tuner returned it.
        seconds: Wall time from outside, processes and records included.
        choices: By form.
        cut_short: The task whose race the end of the time may have cut short; its choice is not final.
    """

    tuning: Tuning
    seconds: float
    choices: dict[Form, Choice]
    cut_short: str = ""

    def is_searched(self, form: Form) -> bool:
        """Say whether a form's race was run to its end, be it a failure."""
        choice = self.choices[form]
        return choice.status != "not searched" and choice.task != self.cut_short

    def winner(self, form: Form) -> Candidate:
        """Return a form's winner.

        Raises:
            UntunedError: It could not be measured.
        """
        choice = self.choices[form]
        if not self.is_searched(form) or choice.status.startswith("failed"):
            raise UntunedError(f"the race of {choice.task} is not over or {choice.status}")
        return choice.winner

    def contender(self, name: str, form: Form) -> Contender:
        """Return a form's winner as a contender."""
        return kernel_contender(name, *self.kernel(form))

    def kernel(self, form: Form) -> tuple[Kernel, dict[str, bytes]]:
        """Return a form's winner and the code it is in."""
        self.winner(form)
        return self.choices[form].kernel, self.tuning.code


def tune_forms(
    forms: Sequence[Form], shop: Shop, options: TuneOptions, tell: Callable[[str], None] = lambda _: None
) -> Tuned:
    """Tune forms in the order given.

    Args:
        forms: Concrete.
        shop: Gives the target.
        options: Records, effort and budget.
        tell: Told a line per task.

    Raises:
        KeyboardInterrupt: The user asked to stop.
    """
    plan = plan_of(forms)
    labels = {task.key: task.label for task in plan.tasks}
    raced: list[str] = []

    def report(event: Event) -> None:
        if isinstance(event, TaskDone) and not event.replayed and event.status != "not searched":
            raced.append(event.task)
            tell(
                f"  tuned {len(raced)}: {labels[event.task]}: {label(event.best)} {event.best_us:.2f} us, "
                f"extern {event.baseline_us:.2f} us, {event.status}, {event.seconds:.1f} s"
            )

    started = time.monotonic()
    tuning = tune(plan, shop.target, options, report)
    seconds = time.monotonic() - started
    if tuning.stopped == "interrupted":
        raise KeyboardInterrupt
    by_key = {choice.task: choice for choice in tuning.choices}
    choices = {planned.task.form: by_key[planned.key] for planned in plan.tasks}
    return Tuned(tuning, seconds, choices, raced[-1] if tuning.stopped and raced else "")
