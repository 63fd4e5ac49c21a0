"""One grid point of the workload as contenders: the tuned model first, then its peers, all doing the same work."""

import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

import torch
from torch import nn

from tune_model.extract.request import Phase
from tune_model.package.verification.original import original_call
from tune_model.pipeline.bench.interleave import Contender
from tune_model.pipeline.bench.peers import decode_step, peers, prefill_call, prepare
from tune_model.runtime.execution.graphs import GraphPool, GraphRunner
from tune_model.runtime.execution.invoke import torch_dtype
from tune_model.runtime.expression import evaluate
from tune_model.runtime.kv_cache import KVCache
from tune_model.runtime.program import Program
from tune_model.runtime.tuned import TunedModel

__all__ = ["Point", "calls_at", "contenders_at", "points_of"]

SPARE_SLOTS = 64
"""Cache slots beyond the context that peers get, as a server that generates a short answer would allocate."""


class Point(NamedTuple):
    """A phase at one point of its grid."""

    phase: str
    sizes: dict[str, int]

    def __str__(self) -> str:
        return f"{self.phase} " + " ".join(f"{name}={value}" for name, value in self.sizes.items())


def points_of(phases: tuple[Phase, ...]) -> Iterator[Point]:
    """Yield every grid point of every phase."""
    for phase in phases:
        names = list(phase.grid)
        for values in itertools.product(*phase.grid.values()):
            yield Point(phase.name, dict(zip(names, values, strict=True)))


def contenders_at(
    point: Point,
    tuned: TunedModel,
    original: nn.Module,
    *,
    compile_too: bool,
    left_out: Callable[[str, str], None],
) -> list[Contender]:
    """Return the contenders of a point, the tuned model first; see `calls_at`, and `prepare` for `left_out`."""
    ours, theirs = calls_at(point, tuned, original)
    wanted = peers(theirs, tuned.device, compile_too=compile_too)
    return [Contender("tuned", ours), *prepare(wanted, tuned.device, left_out=left_out)]


def calls_at(point: Point, tuned: TunedModel, original: nn.Module) -> tuple[Callable[[], object], Callable[[], object]]:
    """Return what runs a point once: the tuned model as a server runs it, and the original as it is.

    Decode steps of the tuned model run in a cache of the configured length, those of the original in the shortest that
    fits.
    """
    device = tuned.device
    program = tuned.programs[point.phase]
    inputs = _inputs(program, point, device)
    if point.phase == "decode":
        batch, context = point.sizes["batch"], point.sizes["context"]
        call: Callable[[], object] = decode_step(original, batch, context, slots=context + SPARE_SLOTS)
    elif point.phase == "prefill":
        call = prefill_call(original, point.sizes["batch"], point.sizes["sequence"])
    else:
        call = _forward_call(original, inputs)
    return _tuned_call(tuned, point, inputs), call


def _tuned_call(tuned: TunedModel, point: Point, inputs: Mapping[str, torch.Tensor]) -> Callable[[], object]:
    """Return a call of the tuned program; on CUDA as its server runs it, from a graph."""
    hints = {s.name: point.sizes[s.name] for s in tuned.programs[point.phase].symbols if s.input is None}
    executor = tuned.executor(point.phase)
    if tuned.device.type != "cuda":
        return lambda: executor.run(inputs, hints)
    runner = GraphRunner(executor, GraphPool(tuned.device))
    return lambda: runner.run(inputs, hints, clone=False)


def _forward_call(original: nn.Module, inputs: Mapping[str, torch.Tensor]) -> Callable[[], object]:
    run = original_call(original, inputs)

    def call() -> object:
        with torch.no_grad():
            return run(inputs)

    return call


def _inputs(program: Program, point: Point, device: torch.device) -> dict[str, torch.Tensor]:
    """Make a call's inputs: random numbers and tokens, full attention masks, caches as if filled up to the context."""
    values = {s.name: point.sizes.get(s.name, s.default or s.minimum) for s in program.symbols}
    made: dict[str, torch.Tensor] = {}
    for item in program.inputs:
        if item.role == "cache":
            continue
        shape = tuple(evaluate(size, values) for size in item.type.shape)
        dtype = torch_dtype(item.type.dtype)
        if item.name == "positions":
            start = point.sizes.get("context", 0)
            made[item.name] = torch.arange(start, start + shape[1], device=device).expand(shape).contiguous()
        elif item.name == "logits_index":
            made[item.name] = torch.full(shape, point.sizes.get("sequence", 1) - 1, device=device, dtype=dtype)
        elif item.name == "attention_mask":
            made[item.name] = torch.ones(shape, device=device, dtype=dtype)
        elif dtype.is_floating_point or dtype.is_complex:
            made[item.name] = torch.randn(shape, device=device, dtype=dtype)
        else:
            high = 2 if item.values is None else evaluate(item.values.high, values) + 1
            made[item.name] = torch.randint(0, max(high, 1), shape, device=device).to(dtype)
    if any(item.role == "cache" for item in program.inputs):
        cache = KVCache(program, values["batch"], device)
        for name, tensor in cache.slice(0, values["batch"]).items():
            made[name] = tensor.normal_()
    return made
