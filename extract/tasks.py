"""Binds the workload: every form of every program at every grid point, equal ones once."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import product
from typing import NamedTuple

from tune_model.extract.bare import bare_form
from tune_model.extract.cost import flops, size_bytes
from tune_model.extract.labels import label
from tune_model.extract.request import Phase, Request
from tune_model.extract.task import NumericRules, PlannedTask, Site, Task, task_key
from tune_model.extract.tracing.front_end import GridError
from tune_model.runtime.expression import evaluate
from tune_model.runtime.program import Apply, Program, Symbol, bind_form, fingerprint

__all__ = ["collect", "grid_points"]

BYTES_PER_FLOP = 1 / 200
"""How a flop weighs against a byte when tasks are ordered: H200's 4.2 TB/s and 800 TFLOP/s, rounded."""


_BARE_SHARE = 0.01
"""What the operator inside a form counts, of an occurrence, when it is tuned for code that calls it alone."""


class _Place(NamedTuple):
    form: str
    dims: tuple[int, ...]


def grid_points(program: Program, phase: Phase) -> list[dict[str, int]]:
    """Return the value of every symbol of a program at every grid point of its phase.

    Raises:
        GridError: The grid lacks a symbol, or a value is out of its bounds.
    """
    choices = [_values(program, symbol, phase) for symbol in program.symbols]
    return [dict(zip((s.name for s in program.symbols), values, strict=True)) for values in product(*choices)]


def _values(program: Program, symbol: Symbol, phase: Phase) -> Sequence[int]:
    values = phase.grid.get(symbol.name)
    if values is None:
        if symbol.default is None:
            raise GridError(
                f"phase {phase.name!r} gives no values for {symbol.name!r}, a size of input {symbol.input!r}; "
                f"expected a list under its name"
            )
        return (symbol.default,)
    for value in values:
        if not symbol.minimum <= value <= symbol.maximum:
            raise GridError(
                f"phase {phase.name!r}: {symbol.name} = {value}; program {program.name!r} takes {symbol.minimum} to "
                f"{symbol.maximum}"
            )
    return tuple(dict.fromkeys(values))


def collect(programs: Iterable[Program], request: Request, *, operators: bool = False) -> tuple[PlannedTask, ...]:
    """Return the unique tasks of some programs, heaviest first.

    Args:
        programs: With forms; one per phase of the request, by name.
        request: Gives grids, weights and numeric rules.
        operators: The bare forms of applied forms are tasks too; the programs have them.

    Raises:
        GridError: A program has no phase, or a grid asks for sizes that it does not take.
    """
    phases = {p.name: p for p in request.phases}
    found: dict[str, _Collected] = {}
    for program in programs:
        phase = phases.get(program.name)
        if phase is None:
            raise GridError(f"program {program.name!r} has no phase; the workload has {sorted(phases)}")
        points = grid_points(program, phase)
        known: dict[_Place, tuple[str, Task]] = {}
        for point in points:
            occurrences = _occurrences(program, point)
            bare = _bare(program, occurrences) if operators else {}
            for place, count in {**occurrences, **bare}.items():
                if place not in known:
                    known[place] = _task(program, place, request.rules)
                key, task = known[place]
                entry = found.setdefault(key, _Collected(task))
                times = occurrences[place]  # a bare form is run by code outside alone
                entry.sites.append(Site(program.name, tuple(sorted(point.items())), place.form, place.dims, times))
                entry.weight += count * phase.weight / len(points)
    tasks = [entry.planned(key) for key, entry in found.items()]
    return tuple(sorted(tasks, key=lambda t: (-t.weight * (t.size_bytes + t.flops * BYTES_PER_FLOP), t.key)))


class _Collected:
    """A task and where it was found so far."""

    def __init__(self, task: Task) -> None:
        self.task = task
        self.sites: list[Site] = []
        self.weight = 0.0

    def planned(self, key: str) -> PlannedTask:
        form = self.task.form
        return PlannedTask(
            key=key,
            label=label(form),
            task=self.task,
            sites=tuple(self.sites),
            weight=self.weight,
            flops=flops(form),
            size_bytes=size_bytes(form),
        )


def _occurrences(program: Program, point: Mapping[str, int]) -> Counter[_Place]:
    return Counter(
        _Place(step.form, tuple(evaluate(d, point) for d in step.dims))
        for step in program.steps
        if isinstance(step, Apply)
    )


def _bare(program: Program, occurrences: Mapping[_Place, int]) -> dict[_Place, float]:
    """Return where the bare forms of applied forms would run, and how much each counts."""
    made: dict[_Place, float] = {}
    for place, count in occurrences.items():
        form = bare_form(program.forms[place.form])
        if form is not None:
            bare = _Place(fingerprint(form), place.dims)
            if bare not in occurrences:
                made[bare] = made.get(bare, 0.0) + _BARE_SHARE * count
    return made


def _task(program: Program, place: _Place, rules: NumericRules) -> tuple[str, Task]:
    task = Task(bind_form(program.forms[place.form], place.dims), rules)
    return task_key(task), task
