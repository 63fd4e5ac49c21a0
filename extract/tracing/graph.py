"""Runs `torch.export` on a fake module and imports the graph: the first rung of the tracing ladder, and its fallback.

Dims are automatic, then read back: a dim that got fixed although the grid asks for several values is an error; with one
value it is traced again as that constant.
"""

import io
import logging
import sysconfig
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, redirect_stderr
from pathlib import Path
from typing import NamedTuple

import torch
from torch.export import Dim as ExportDim
from torch.export import ExportedProgram
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

from tune_model.extract.request import Phase
from tune_model.extract.tracing.build import Built, first_line, weight_names
from tune_model.extract.tracing.front_end import Trace, TraceError, UnknownAttentionError
from tune_model.extract.tracing.import_graph import (
    Interface,
    MutationError,
    NamedInput,
    SpecialisedError,
    import_program,
)
from tune_model.runtime.errors import TuneModelError
from tune_model.runtime.expression import Dim

__all__ = [
    "ExampleInput",
    "Run",
    "Subject",
    "example_sizes",
    "fix_single_sizes",
    "import_functional",
    "trace_graph",
]

Run = Callable[[torch.nn.Module, dict[str, torch.Tensor]], dict[str, torch.Tensor]]


class ExampleInput(NamedTuple):
    """An input to trace with."""

    named: NamedInput
    dtype: torch.dtype


class Subject(NamedTuple):
    """What to trace.

    Attributes:
        phase: Name of the program.
        model: For messages: `the llama model`.
        built: The fake module.
        run: Calls it with the inputs by name; returns its outputs by name.
        inputs: In calling order.
        maximum: Largest legal value of symbols that have one.
        saved: Names of weights in the checkpoint where they differ from the module's.
    """

    phase: str
    model: str
    built: Built
    run: Run
    inputs: tuple[ExampleInput, ...]
    maximum: Mapping[str, int]
    saved: Mapping[str, str]


class _Function(torch.nn.Module):
    """The traced function: one dict in, a tuple of tensors out."""

    def __init__(self, entry: Subject, names: list[str]) -> None:
        super().__init__()
        self.model = entry.built.module
        self._run = entry.run
        self._note = names.append

    def forward(self, inputs: dict[str, torch.Tensor]) -> tuple[torch.Tensor, ...]:
        outputs = self._run(self.model, inputs)
        for name in outputs:
            self._note(name)
        return tuple(outputs.values())


def example_sizes(inputs: Iterable[ExampleInput], phases: Iterable[Phase]) -> dict[str, int]:
    """Choose a size for each symbol: at least 2 (export takes 1 for a constant), different for different symbols.

    The smallest grid value is taken where possible, since a model may refuse other sizes (images, strided audio).
    """
    phases = tuple(phases)
    found: dict[str, int] = {}
    for example in inputs:
        for dim in example.named.dims:
            if isinstance(dim, str) and dim not in found:
                grid = sorted({v for p in phases for v in p.grid.get(dim, ()) if v > 1})
                free = [v for v in (*grid, 2, 3, 5, 7, 11, 13, 17, 19) if v not in found.values()]
                found[dim] = free[0]
    return found


def trace_graph(entry: Subject, phases: Iterable[Phase], sizes: Mapping[str, int]) -> Trace:
    """Trace one phase.

    Args:
        entry: What to trace.
        phases: Whose grids say which values each symbol takes.
        sizes: From `example_sizes`, or better ones.

    Raises:
        TraceError: The model cannot be exported, or is only right for some of the grid.
    """
    return fix_single_sizes(f"{entry.model}, {entry.phase}", phases, lambda fixed: _trace(entry, sizes, fixed))


def fix_single_sizes(what: str, phases: Iterable[Phase], attempt: Callable[[Mapping[str, int]], Trace]) -> Trace:
    """Trace, and where a symbol turns out to be specialised and the grid has one value for it, trace at that value.

    Args:
        what: Model and phase, for messages.
        phases: Whose grids say which values each symbol takes.
        attempt: Imports a graph with some symbols fixed.

    Raises:
        SpecialisedError: A symbol is specialised that needs several values.
        TraceError: The graph cannot be imported.
    """
    phases = tuple(phases)
    fixed: dict[str, int] = {}
    while True:
        try:
            trace = attempt(fixed)
        except SpecialisedError as error:
            grid = {v for p in phases for v in p.grid.get(error.symbol, ())}
            if error.symbol in fixed or len(grid) != 1:
                raise SpecialisedError(f"{what}: {error}", error.symbol) from error
            fixed[error.symbol] = grid.pop()
            continue
        except UnknownAttentionError:
            raise
        except TraceError as error:
            raise TraceError(f"{what}: {error}") from error
        notes = tuple(f"{name} is fixed at {value}: the model specialises it" for name, value in fixed.items())
        return trace._replace(notes=(*trace.notes, *notes))


def _trace(entry: Subject, sizes: Mapping[str, int], fixed: Mapping[str, int]) -> Trace:
    def settle(dim: Dim) -> Dim:
        return fixed.get(dim, dim) if isinstance(dim, str) else dim

    examples: dict[str, torch.Tensor] = {}
    dynamic: dict[str, dict[int, object]] = {}
    named: list[NamedInput] = []
    for example in entry.inputs:
        given = example.named._replace(dims=tuple(settle(d) for d in example.named.dims))
        shape = tuple(sizes[d] if isinstance(d, str) else d for d in given.dims)
        with entry.built.mode:
            examples[given.name] = torch.zeros(shape, dtype=example.dtype)
        dynamic[given.name] = {i: ExportDim.AUTO for i, d in enumerate(given.dims) if isinstance(d, str)}
        named.append(given)
    outputs: list[str] = []
    exported = _export(_Function(entry, outputs), examples, dynamic)
    interface = Interface(
        phase=entry.phase,
        inputs=tuple(named),
        outputs=tuple(outputs),
        weights={f"model.{k}": entry.saved.get(v, v) for k, v in weight_names(entry.built.module).items()},
        maximum=entry.maximum,
    )
    return import_functional(exported, interface)


def _export(
    function: torch.nn.Module, examples: dict[str, torch.Tensor], dynamic: dict[str, dict[int, object]]
) -> ExportedProgram:
    try:
        with torch.no_grad(), _quiet():
            return torch.export.export(function, (examples,), dynamic_shapes=(dynamic,), strict=False)
    except UnknownAttentionError:
        raise
    except TuneModelError as error:
        raise TraceError(str(error)) from error
    except (Exception, SystemExit) as error:  # whatever the model's code or the tracer raises
        raise TraceError(f"it cannot be traced{_line_of_model(error)}: {_reason(error)}") from error


def _reason(error: BaseException) -> str:
    if isinstance(error, GuardOnDataDependentSymNode):
        return (
            "it decides by a value that is computed while it runs; expected control flow that depends on sizes alone"
            " (torch.where takes both branches)"
        )
    return f"{type(error).__name__}: {first_line(error)}"


def _line_of_model(error: BaseException) -> str:
    """Return ` at FILE:LINE (CODE)`: the innermost line that is neither Python's, torch's nor ours: the model's."""
    ours = (Path(torch.__file__).parent, Path(__file__).parents[1])
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        file = Path(frame.filename)
        own = any(file.is_relative_to(folder) for folder in ours)
        python = file.is_relative_to(sysconfig.get_path("stdlib")) and "site-packages" not in file.parts
        if not (own or python or frame.filename.startswith("<")):
            return f" at {file.name}:{frame.lineno} ({frame.line})"
    return ""


_TRACERS = ("torch.export", "torch._subclasses.fake_tensor", "torch.fx.experimental.symbolic_shapes")


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence what the tracer logs and prints (the graph so far) before it raises the same, and what it warns of."""
    levels = {name: logging.getLogger(name).level for name in _TRACERS}
    try:
        for name in _TRACERS:
            logging.getLogger(name).setLevel(logging.CRITICAL + 1)
        with redirect_stderr(io.StringIO()), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for name, level in levels.items():
            logging.getLogger(name).setLevel(level)


def import_functional(exported: ExportedProgram, interface: Interface) -> Trace:
    """Import a graph; one that writes into its values is functionalised first (composite operators stay whole)."""
    try:
        return import_program(exported, interface)
    except MutationError:
        with _quiet():
            functional = exported.run_decompositions({})
        trace = import_program(functional, interface)
        return trace._replace(notes=(*trace.notes, "in-place operations were functionalised"))
