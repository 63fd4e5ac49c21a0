"""`extract`: a request to programs and tasks, from the first trace to the last task."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import msgspec
import torch

from tune_model.extract.bare import with_bare_forms
from tune_model.extract.regions.group import group
from tune_model.extract.request import ExportedSource, FactorySource, Request, TransformersSource
from tune_model.extract.rewrite import rewrite
from tune_model.extract.task import Plan, Skipped
from tune_model.extract.tasks import collect
from tune_model.extract.tracing.front_end import Trace
from tune_model.runtime.program import Constant, Program

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
    """A trace with regions, and what stayed outside them."""

    trace: Trace
    skipped: tuple[Skipped, ...]


def extract(request: Request, *, check: bool = True, operators: bool = False) -> Extraction:
    """Trace a model, simplify it, form regions and bind the workload. Needs no GPU and no weights.

    Args:
        request: What to extract.
        check: Compare programs made the same way, of a small copy where the model is large, with the eager model.
        operators: Tune operators inside fused forms by themselves too, for code that calls them one by one. Their forms
            stand in the programs, and no step applies them.

    Raises:
        TuneModelError: The model cannot be built or traced, the grid does not fit it, or the copy's programs compute
            something else.
    """
    with _few_collections():
        lowered = [lower(t) for t in trace(request)]
        checked = _compare(request) if check else ()
    programs, constants = _share_constants([one.trace for one in lowered])
    if operators:
        programs = tuple(with_bare_forms(program) for program in programs)
    plan = Plan(
        programs=programs,
        tasks=collect(programs, request, operators=operators),
        skipped=tuple(s for one in lowered for s in one.skipped),
        notes=(*(n for one in lowered for n in one.trace.notes), *checked),
    )
    return Extraction(plan, constants)


def _compare(request: Request) -> tuple[str, ...]:
    from tune_model.extract.checking.equivalence import check_equivalence

    found = check_equivalence(request, lambda raw: lower(raw).trace)
    if not found:
        return ("not compared with the eager model: it is too large to run here and no small copy of it can be made",)
    worst = max(c.error for c in found)
    return (f"compared with the eager model in float32: {len(found)} outputs, largest relative error {worst:.0e}",)


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


def lower(raw: Trace) -> Lowered:
    """Rewrite a raw trace and form its regions."""
    program, skipped = group(rewrite(raw.program))
    used = {c.key for c in program.constants}
    constants = {k: v for k, v in raw.constants.items() if k in used}
    return Lowered(Trace(program, constants, raw.notes), skipped)


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
