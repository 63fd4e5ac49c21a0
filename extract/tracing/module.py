"""Front end for any module: `package.module:factory` and the inputs that the request names."""

import inspect

import torch

from tune_model.extract.checking.grid import check_grid, check_names
from tune_model.extract.request import FactorySource, Request
from tune_model.extract.tracing.build import Built, build_factory, make_fake, torch_dtype
from tune_model.extract.tracing.front_end import SourceError, Trace, TraceError
from tune_model.extract.tracing.graph import ExampleInput, Run, Subject, example_sizes, trace_graph
from tune_model.extract.tracing.import_graph import NamedInput
from tune_model.extract.tracing.outputs import named_outputs

__all__ = ["call_by_name", "module_inputs", "trace_built", "trace_module"]


def trace_module(request: Request) -> tuple[Trace, ...]:
    """Trace every phase of a factory's module.

    Args:
        request: With a `FactorySource`, its inputs, and a task other than `causal-lm`.

    Raises:
        SourceError: The factory fails, or the request lacks its inputs.
        TraceError: The module cannot be traced.
    """
    source = request.source
    if not isinstance(source, FactorySource):
        raise TypeError(f"trace_module got a {type(source).__name__}")
    inputs = module_inputs(request)
    check_names((i.named for i in inputs), request.phases, f"the module of {source.factory}")
    notes: tuple[str, ...] = ()
    try:
        module = build_factory(source, request.dtype)
    except SourceError:  # a constructor that computes with its parameters needs real ones
        module = build_factory(source, request.dtype, real=True)
        notes = ("built with memory: the factory fails without",)
    traces = trace_built(request, make_fake(module), inputs, f"the module of {source.factory}")
    return tuple(t._replace(notes=(*t.notes, *notes)) for t in traces)


def module_inputs(request: Request) -> tuple[ExampleInput, ...]:
    """Return the request's inputs.

    Raises:
        SourceError: It has none.
        TraceError: The task needs more than a module.
    """
    if request.task == "causal-lm":
        raise TraceError("causal-lm needs a transformers model, whose attention can be recognised; use task: forward")
    if not request.inputs:
        raise SourceError("a module's inputs cannot be derived; list them under inputs: with name, shape and dtype")
    return tuple(ExampleInput(NamedInput(i.name, i.shape), torch_dtype(i.dtype)) for i in request.inputs)


def trace_built(request: Request, built: Built, inputs: tuple[ExampleInput, ...], model: str) -> tuple[Trace, ...]:
    """Trace every phase of a fake module."""
    run = call_by_name(built.module)
    traces = []
    for phase in request.phases:
        entry = Subject(phase.name, model, built, run, inputs, {}, {})
        trace = trace_graph(entry, request.phases, example_sizes(inputs, request.phases))
        check_grid(trace.program, phase, model)
        notes = ("torch.export with dynamic sizes", *trace.notes)
        traces.append(trace._replace(notes=tuple(f"{phase.name}: {n}" for n in notes)))
    return tuple(traces)


def call_by_name(module: torch.nn.Module) -> Run:
    """Return how to call a module with named inputs: by keyword where its forward knows the names, else in order."""
    parameters = inspect.signature(module.forward).parameters
    keywords = {n for n, p in parameters.items() if p.kind in {p.KEYWORD_ONLY, p.POSITIONAL_OR_KEYWORD}}
    anything = any(p.kind is p.VAR_KEYWORD for p in parameters.values())

    def run(module: torch.nn.Module, given: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        by_keyword = keywords.issuperset(given) or (anything and not keywords)
        return named_outputs(module(**given) if by_keyword else module(*given.values()))

    return run
