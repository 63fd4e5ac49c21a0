"""`extract`: a request to programs and tasks, from the first trace to the last task."""

import gc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import product
from typing import NamedTuple

import msgspec
import torch

from tune_model.extract.bare import with_bare_forms
from tune_model.extract.regions.group import USUAL, Grouped, Grouping, group, other_groupings
from tune_model.extract.request import ExportedSource, FactorySource, Request, TransformersSource
from tune_model.extract.rewrite import rewrite
from tune_model.extract.task import Plan, Rival, Skipped
from tune_model.extract.tasks import collect
from tune_model.extract.tracing.front_end import Trace, TraceError
from tune_model.runtime.program import Constant, Input, Program, Weight
from tune_model.runtime.weights.checkpoint import STORED_DTYPES

__all__ = ["Extraction", "extract", "lower"]


class Extraction(NamedTuple):
    """Everything extract found.

    Attributes:
        plan: Programs and tasks.
        constants: Value of every `Constant.key` of the programs, on the CPU.
    """

    plan: Plan
    constants: dict[str, torch.Tensor]


class Lowered(NamedTuple):
    """A trace with regions, and what stayed outside them.

    Attributes:
        trace: As grouped by default.
        skipped: By that grouping.
        others: Other groupings, each with other regions than all before it.
    """

    trace: Trace
    skipped: tuple[Skipped, ...]
    others: tuple[tuple[Grouping, Grouped], ...] = ()


def extract(request: Request, *, check: bool = True, operators: bool = False, widest: Grouping = USUAL) -> Extraction:
    """Trace a model, simplify it, form regions and bind the workload. Needs no GPU and no weights.

    Args:
        request: What to extract.
        check: Compare programs made the same way, of a small copy where the model is large, with the eager model.
        operators: Tune operators inside fused forms by themselves too, for code that calls them one by one. Their forms
            stand in the programs, and no step applies them.
        widest: Give the plan rivals: other groupings of its programs, up to this one.

    Raises:
        TuneModelError: The model cannot be built or traced, the grid does not fit it, or the copy's programs compute
            something else.
    """
    with _few_collections():
        lowered = [lower(t, widest) for t in trace(request)]
        checked = _compare(request, widest if any(one.others for one in lowered) else USUAL) if check else ()
    programs, constants = _share_constants([one.trace for one in lowered])
    notes = (*(n for one in lowered for n in one.trace.notes), *checked)

    def planned(chosen: Sequence[_Option]) -> Plan:
        made = tuple(with_bare_forms(option.program) if operators else option.program for option in chosen)
        skipped = tuple(entry for option in chosen for entry in option.skipped)
        return Plan(made, collect(made, request, operators=operators), skipped, notes)

    usual, *others = product(*(_options(program, one) for program, one in zip(programs, lowered, strict=True)))
    rivals = tuple(Rival("; ".join(o.what for o in other if o.what), planned(other)) for other in others)
    return Extraction(msgspec.structs.replace(planned(usual), rivals=rivals), constants)


class _Option(NamedTuple):
    """A program in one grouping, and how it differs from the usual one."""

    program: Program
    skipped: tuple[Skipped, ...]
    what: str


def _options(program: Program, lowered: Lowered) -> list[_Option]:
    """Return a program's groupings, the usual one first."""
    options = [_Option(program, lowered.skipped, "")]
    for grouping, (other, skipped) in lowered.others:
        options.append(_Option(_with_constants(other, program.constants), skipped, f"{program.name}: {grouping}"))
    return options


def _compare(request: Request, widest: Grouping) -> tuple[str, ...]:
    from tune_model.extract.checking.equivalence import check_equivalence, compared_in

    found = check_equivalence(request, lambda raw: lower(raw).trace)
    if widest != USUAL:
        found += check_equivalence(request, lambda raw: _lower_otherwise(raw, widest))
    if not found:
        return ("not compared with the eager model: it is too large to run here and no small copy of it can be made",)
    worst = max(c.error for c in found)
    dtype = compared_in(request)
    return (f"compared with the eager model in {dtype}: {len(found)} outputs, largest relative error {worst:.0e}",)


def trace(request: Request) -> tuple[Trace, ...]:
    """Trace every phase with the front end of the request's source."""
    match request.source:
        case TransformersSource():
            from tune_model.extract.tracing.transformers_model import trace_transformers

            return trace_transformers(request)
        case FactorySource():
            from tune_model.extract.tracing.module import trace_module

            return trace_module(request)
        case ExportedSource():
            from tune_model.extract.tracing.exported import trace_exported

            return trace_exported(request)


def lower(raw: Trace, widest: Grouping = USUAL) -> Lowered:
    """Rewrite a raw trace and form its regions, in every grouping up to the widest.

    Raises:
        TraceError: Something is of a dtype that no artifact holds.
    """
    rewritten = rewrite(raw.program)
    _check_dtypes(rewritten)
    program, skipped = group(rewritten)
    others: list[tuple[Grouping, Grouped]] = []
    for grouping in other_groupings(widest):
        made = group(rewritten, grouping)
        if all(made.program.forms != known.forms for known in (program, *(o.program for _, o in others))):
            others.append((grouping, made))
    used = {c.key for c in program.constants}
    constants = {k: v for k, v in raw.constants.items() if k in used}
    return Lowered(Trace(program, constants, raw.notes), skipped, tuple(others))


def _check_dtypes(program: Program) -> None:
    named = [*((f"{kind} {t.name!r}", t.type) for kind, tensors in _held(program) for t in tensors)]
    for what, type_ in (*named, *((f"the value {name!r}", type_) for name, type_ in program.values.items())):
        if type_.dtype not in STORED_DTYPES:
            known = ", ".join(sorted(STORED_DTYPES))
            pairs = "complex64, or pairs of real numbers (torch.view_as_real)"
            expected = pairs if type_.dtype.startswith("complex") else f"one of {known}"
            raise TraceError(f"{program.name}: {what} is {type_.dtype}, which no artifact holds; expected {expected}")


def _held(program: Program) -> tuple[tuple[str, Sequence[Input | Weight | Constant]], ...]:
    return ("the input", program.inputs), ("the weight", program.weights), ("the constant", program.constants)


def _lower_otherwise(raw: Trace, grouping: Grouping) -> Trace:
    return lower(raw).trace._replace(program=group(rewrite(raw.program), grouping).program)


@contextmanager
def _few_collections() -> Iterator[None]:
    """Trace with rare garbage collections: graphs hold many objects that live to the end, and each pass visits them."""
    before = gc.get_threshold()
    gc.set_threshold(100_000, 50, 50)
    try:
        yield
    finally:
        gc.set_threshold(*before)


def _share_constants(traces: list[Trace]) -> tuple[tuple[Program, ...], dict[str, torch.Tensor]]:
    """Give constants of different values different keys; equal ones of several phases share theirs."""
    constants: dict[str, torch.Tensor] = {}
    programs: list[Program] = []
    for one in traces:
        renamed: dict[str, str] = {}
        for key, value in one.constants.items():
            known = constants.get(key)
            equal = known is not None and known.dtype == value.dtype and torch.equal(known, value)
            renamed[key] = key if known is None or equal else f"{one.program.name}.{key}"
            constants[renamed[key]] = value
        kept = tuple(Constant(c.name, c.type, renamed[c.key]) for c in one.program.constants)
        programs.append(_with_constants(one.program, kept))
    return tuple(programs), constants


def _with_constants(program: Program, constants: tuple[Constant, ...]) -> Program:
    return msgspec.structs.replace(program, constants=constants)
