"""Checks that a traced program fits every point of its phase's grid.

The tracer assumes what its example sizes satisfy (an even number of rows, say) and keeps quiet about it; a view that
does not hold as many elements as its argument gives that away.
"""

import itertools
import math
from collections.abc import Iterable, Iterator

from tune_model.extract.request import Phase
from tune_model.extract.tracing.front_end import GridError
from tune_model.extract.tracing.import_graph import NamedInput
from tune_model.runtime.expression import ExpressionError, evaluate
from tune_model.runtime.program import Call, Program, Ref, TensorType

__all__ = ["check_grid", "check_names"]


def check_grid(program: Program, phase: Phase, model: str) -> None:
    """Check a raw program's views at every grid point.

    Args:
        program: Raw.
        phase: Its grid; symbols that it lacks are taken at their minimum.
        model: For the message.

    Raises:
        GridError: A point is outside a symbol's range, or the program does not fit it.
    """
    views = list(_views(program))
    for point in _points(program, phase):
        for symbol in program.symbols:
            if symbol.input is not None and not symbol.minimum <= point[symbol.name] <= symbol.maximum:
                raise GridError(
                    f"{model}, {phase.name}: {symbol.name} is {point[symbol.name]} in the grid; the model takes"
                    f" {symbol.minimum} to {symbol.maximum}"
                )
        for before, after in views:
            if _elements(before, point) != _elements(after, point):
                sizes = ", ".join(f"{name} {value}" for name, value in point.items())
                raise GridError(
                    f"{model}, {phase.name}: it does not run at {sizes}: {list(before.shape)} is viewed as"
                    f" {list(after.shape)}. Choose sizes that it can divide"
                )


def check_names(inputs: Iterable[NamedInput], phases: Iterable[Phase], model: str) -> None:
    """Refuse values for a size that no input has: a misspelt one would be tuned at one size and go unnoticed.

    Args:
        inputs: Of the model, before any size is fixed.
        phases: With their grids.
        model: For the message.

    Raises:
        GridError: A grid has such a name.
    """
    known = list(dict.fromkeys(d for i in inputs for d in i.dims if isinstance(d, str)))
    for phase in phases:
        for name in sorted(phase.grid.keys() - set(known)):
            sizes = ", ".join(known) or "none: all are fixed"
            raise GridError(
                f"{model}, {phase.name}: the grid has values for {name}; the sizes of its inputs are {sizes}"
            )


def _views(program: Program) -> Iterator[tuple[TensorType, TensorType]]:
    types = {i.name: i.type for i in program.inputs} | {w.name: w.type for w in program.weights} | program.values
    seen: set[tuple[TensorType, TensorType]] = set()
    for step in program.steps:
        if isinstance(step, Call) and step.op == "aten.view.default" and isinstance(step.args[0], Ref):
            before, after = types.get(step.args[0].name), types[str(step.results[0])]
            if before is not None and (before, after) not in seen:
                seen.add((before, after))
                yield before, after


def _points(program: Program, phase: Phase) -> Iterator[dict[str, int]]:
    symbols = [s for s in program.symbols if s.input is not None]
    values = [phase.grid.get(s.name, (s.minimum,)) for s in symbols]
    for point in itertools.product(*values):
        yield dict(zip((s.name for s in symbols), point, strict=True))


def _elements(type_: TensorType, point: dict[str, int]) -> int | None:
    try:
        return math.prod(evaluate(s, point) for s in type_.shape)
    except ExpressionError:
        return None
