"""What an artifact has for the sizes a deployment will ask for: the runtime's rule, asked beforehand, running nothing.

Every step of a program at every set of sizes is looked up as dispatch looks it up, with the weights' layouts as they
are; addresses count as aligned, and a library that this machine has not got as the version that was tuned with.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import Literal

import msgspec

from tune_model.extract.task import Site
from tune_model.package.format.records import TaskRecord
from tune_model.package.read import Artifact
from tune_model.runtime.execution.dispatch import fits, form_label, nearest_entry, weight_layout
from tune_model.runtime.expression import evaluate
from tune_model.runtime.program import Apply, Form, Program, bind_form
from tune_model.runtime.replay import Entry, select, slot_sizes

__all__ = ["Asked", "Lacking", "PointCoverage", "cover"]


class Asked(msgspec.Struct, frozen=True):
    """Sizes that a deployment will ask for, or did.

    Attributes:
        phase: Of the workload.
        sizes: Value of each size.
        runs: How often it was asked for; 0 when that is not known.
    """

    phase: str
    sizes: dict[str, int]
    runs: int = 0


class Lacking(msgspec.Struct, frozen=True):
    """A form that is not tuned at a set of sizes.

    Attributes:
        label: The form's kind and operators.
        dims: Value of each of the form's dims.
        steps: How many steps of the program apply it.
        outcome: `near`: a kernel tuned at other sizes runs; `miss`: the form's own operators do.
        candidate: Label of what runs; empty for a miss.
        nearest: Grid point of the nearest entry, `decode batch=1 context=1024`; empty when the form has none.
        reasons: Why nearer entries cannot run.
    """

    label: str
    dims: tuple[int, ...]
    steps: int
    outcome: Literal["near", "miss"]
    candidate: str
    nearest: str
    reasons: tuple[str, ...]


class PointCoverage(msgspec.Struct, frozen=True):
    """What an artifact has at one set of sizes.

    Attributes:
        phase: Of the workload.
        sizes: Value of each size.
        runs: As asked.
        exact: Steps that run a kernel tuned at just these sizes.
        near: Steps that run one tuned at other sizes.
        miss: Steps that run their own operators.
        refused: Why the program does not take these sizes at all; empty when it does.
        lacking: What is not exact, misses first.
    """

    phase: str
    sizes: dict[str, int]
    runs: int
    exact: int
    near: int
    miss: int
    refused: str
    lacking: tuple[Lacking, ...]

    @property
    def covered(self) -> bool:
        """Every step runs a kernel tuned at just these sizes."""
        return not self.refused and not self.lacking

    @property
    def nearest(self) -> str:
        """The grid point that most of what is lacking comes from."""
        counts: dict[str, int] = {}
        for row in self.lacking:
            if row.nearest:
                counts[row.nearest] = counts.get(row.nearest, 0) + row.steps
        return max(counts, key=lambda point: counts[point], default="")


def cover(artifact: Artifact, asked: Iterable[Asked]) -> Iterator[PointCoverage]:
    """Look up every step at every set of sizes.

    Raises:
        ArtifactError: The records cannot be read.
    """
    points = _grid_points(artifact)
    known: dict[tuple[str, tuple[int, ...], tuple[tuple[str, str], ...]], Lacking | None] = {}
    for one in asked:
        program = artifact.programs.get(one.phase)
        problem = f"there is no program {one.phase!r}" if program is None else _refusal(program, one.sizes)
        if program is None or problem:
            yield PointCoverage(one.phase, dict(one.sizes), one.runs, 0, 0, 0, problem, ())
            continue
        symbols = {s.name: one.sizes.get(s.name, s.default or 0) for s in program.symbols}
        layouts = {weight.name: weight_layout(weight) for weight in program.weights}
        exact = 0
        lacking: dict[Lacking, int] = {}
        for step in program.steps:
            if not isinstance(step, Apply):
                continue
            form = program.forms[step.form]
            dims = tuple(evaluate(dim, symbols) for dim in step.dims)
            bound = zip(form.parameters, step.inputs, strict=True)
            slots = tuple((p.name, layout) for p, value in bound if (layout := layouts.get(value)) is not None)
            key = (step.form, dims, slots)
            if key not in known:
                known[key] = _look_up(artifact.replay.forms.get(step.form, ()), form, dims, dict(slots), points)
            found = known[key]
            if found is None:
                exact += 1
            else:
                lacking[found] = lacking.get(found, 0) + 1
        yield _point(one, exact, lacking)


def _point(asked: Asked, exact: int, lacking: Mapping[Lacking, int]) -> PointCoverage:
    rows = [msgspec.structs.replace(row, steps=steps) for row, steps in lacking.items()]
    rows.sort(key=lambda row: (row.outcome != "miss", -row.steps, row.label, row.dims))
    near, miss = (sum(row.steps for row in rows if row.outcome == outcome) for outcome in ("near", "miss"))
    return PointCoverage(asked.phase, dict(asked.sizes), asked.runs, exact, near, miss, "", tuple(rows))


def _refusal(program: Program, sizes: Mapping[str, int]) -> str:
    """Say why a program does not take some sizes; empty when it does."""
    for symbol in program.symbols:
        value = sizes.get(symbol.name, symbol.default)
        if value is None:
            return f"no value for {symbol.name}"
        if not symbol.minimum <= value <= symbol.maximum:
            return f"{symbol.name} is {value}; the program takes {symbol.minimum} to {symbol.maximum}"
    return ""


def _look_up(
    entries: tuple[Entry, ...], form: Form, dims: tuple[int, ...], layouts: Mapping[str, str], points: Mapping[str, str]
) -> Lacking | None:
    """Return what is lacking for a form at some dims; `None` when it is tuned there. `steps` is left 0."""
    legal = tuple(e for e in entries if len(e.dims) == len(dims) and fits(e.kernel, layouts, elsewhere=True))
    selection = select(legal, dims, slot_sizes(bind_form(form, dims)), {})
    if selection.entry is not None and selection.exact:
        return None
    shown = selection.entry or nearest_entry(legal, dims)
    return Lacking(
        label=form_label(form),
        dims=dims,
        steps=0,
        outcome="miss" if selection.entry is None else "near",
        candidate="" if selection.entry is None else selection.entry.candidate,
        nearest="" if shown is None else points.get(shown.task, ""),
        reasons=selection.reasons,
    )


def _grid_points(artifact: Artifact) -> dict[str, str]:
    """Return where each task was first found, as text."""
    tasks = (record.planned for record in artifact.records() if isinstance(record, TaskRecord))
    return {task.key: _text(task.sites[0]) for task in tasks if task.sites}


def _text(site: Site) -> str:
    return " ".join([site.program, *(f"{name}={value}" for name, value in site.point)])
