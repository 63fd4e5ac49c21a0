"""Compares programs with the eager model, on a small copy with real random weights.

The copy goes through the same tracing and rewriting as the model itself and runs in the runtime's executor; the
reference is transformers' own eager attention over whole sequences, so caches, positions, masks and rewrites are all
checked against something that has none of them. It runs on sizes that the trace never saw, 1 among them.
"""

from collections.abc import Callable, Mapping
from inspect import signature
from typing import Any, NamedTuple

import torch

from tune_model.extract.build import build_real, load_config, weight_names
from tune_model.extract.request import Phase, Request, TransformersSource
from tune_model.extract.shrink import small_configs
from tune_model.extract.trace import SourceError, Trace, TraceError
from tune_model.extract.trace_transformers import forward_settings, trace_config
from tune_model.runtime.executor import Executor
from tune_model.runtime.expression import evaluate
from tune_model.runtime.program import Cast, Concatenate, Input, Program, Transpose
from tune_model.runtime.replay import Replay

__all__ = ["Comparison", "EquivalenceError", "Lower", "check_equivalence", "randomise"]

TOLERANCE = 1e-5
"""Relative error (Frobenius) allowed in float32. Wrong masks, positions and layouts give 1e-3 to 1."""

PARAMETERS_AT_MOST = 300_000_000
"""Copies that stay larger than this are not compared."""

Lower = Callable[[Trace], Trace]


class EquivalenceError(TraceError):
    """A program does not compute what the model computes."""


class Comparison(NamedTuple):
    """One comparison.

    Attributes:
        program: Phase.
        what: Output and sizes.
        error: Relative error.
    """

    program: str
    what: str
    error: float


def check_equivalence(request: Request, lower: Lower) -> tuple[Comparison, ...]:
    """Compare the programs of a small copy of a transformers model with the model.

    Args:
        request: As given to `trace_transformers`.
        lower: What is done to a trace afterwards (rewrites, regions); the result is what is compared.

    Returns:
        Every comparison made; empty when no copy is small enough.

    Raises:
        EquivalenceError: One differs by more than `TOLERANCE`.
    """
    source = request.source
    if not isinstance(source, TransformersSource):
        raise TypeError(f"check_equivalence got a {type(source).__name__}")
    found = _small_model(source, load_config(source), request.task)
    if found is None:
        return ()
    config, model = found
    request = _small_request(request)
    traces = {t.program.name: lower(t) for t in trace_config(request, source, config)}
    runs = {name: _executor(trace, model) for name, trace in traces.items()}
    if request.task == "causal-lm":
        comparisons = _compare_decoder(runs, model, config)
    else:
        comparisons = [c for run in runs.values() for c in _compare_forward(run, model)]
    for comparison in comparisons:
        if not comparison.error <= TOLERANCE:
            raise EquivalenceError(
                f"{config.model_type}, {comparison.program}, {comparison.what}: the program differs from the eager model"
                f" by {comparison.error:.1e} (relative, float32, small copy with random weights); expected at most"
                f" {TOLERANCE:.0e}. The model does something that the tracer misses; trace it as another task"
            )
    return tuple(comparisons)


# ------------------------------------------------------------------------------------------------------- small copies


def _small_model(source: TransformersSource, config: Any, task: str) -> tuple[Any, torch.nn.Module] | None:
    """Build the smallest copy that transformers accepts, with random weights."""
    for small in small_configs(config):
        try:
            model = build_real(source, small, task, at_most=PARAMETERS_AT_MOST)
        except SourceError:
            continue
        if model is None:
            return None
        randomise(model)
        if _runs(model):
            return small, model
    return None


def _runs(model: torch.nn.Module) -> bool:
    """Whether the sizes of a shrunk configuration fit together."""
    if (
        getattr(model, "main_input_name", "") != "input_ids"
        or "decoder_input_ids" in signature(model.forward).parameters
    ):
        return True
    try:
        with torch.no_grad():
            model(input_ids=torch.zeros(1, 5, dtype=torch.int64), **forward_settings(model))
    except Exception:  # noqa: BLE001 -- any failure says the same
        return False
    return True


def randomise(model: torch.nn.Module, seed: int = 0) -> None:
    """Give every weight values at which nothing hides: unit gain for matrices, spread-out norms and biases."""
    generator = torch.Generator().manual_seed(seed)

    def normal(tensor: torch.Tensor) -> torch.Tensor:
        return torch.randn(tensor.shape, generator=generator, dtype=torch.float32).to(tensor.dtype)

    seen: set[int] = set()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if id(parameter) in seen:
                continue
            seen.add(id(parameter))
            if parameter.dim() > 1:
                parameter.copy_(normal(parameter) * parameter[0].numel() ** -0.5)
            else:
                parameter.copy_(normal(parameter) * 0.1 + (1.0 if name.endswith("weight") else 0.0))
        for name, buffer in model.named_buffers():
            if name.endswith("running_var"):
                buffer.copy_(normal(buffer).abs() + 0.5)
            elif name.endswith("running_mean"):
                buffer.copy_(normal(buffer) * 0.1)


def _small_request(request: Request) -> Request:
    grids = {"batch": (1, 2), "sequence": (1, 7), "context": (8,)}
    phases = tuple(Phase(p.name, {s: grids.get(s, v) for s, v in p.grid.items()}, p.weight) for p in request.phases)
    return Request(
        request.source, "float32", request.task, phases, request.inputs, max_length=16, max_batch=4, rules=request.rules
    )


def _executor(trace: Trace, model: torch.nn.Module) -> Executor:
    tensors = dict(model.state_dict(keep_vars=True))
    for name, saved in weight_names(model).items():
        tensors.setdefault(saved, tensors.get(name, torch.empty(0)))
    weights = _bind(trace.program, tensors)
    return Executor(trace.program, weights, trace.constants, Replay({}), {}, "cpu")


def _bind(program: Program, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    bound: dict[str, torch.Tensor] = {}
    for weight in program.weights:
        parts = [tensors[s].detach() for s in weight.sources]
        value = parts[0]
        for transform in weight.transforms:
            if isinstance(transform, Concatenate):
                value = torch.cat(parts, transform.dim)
            elif isinstance(transform, Transpose):
                value = value.t().contiguous().t()
            elif isinstance(transform, Cast):
                value = value.to(getattr(torch, transform.dtype))
        bound[weight.name] = value
    return bound


# ---------------------------------------------------------------------------------------------------------- comparing


def _error(seen: torch.Tensor, expected: torch.Tensor) -> float:
    if seen.shape != expected.shape:
        raise EquivalenceError(f"an output has shape {tuple(seen.shape)}; the model gives {tuple(expected.shape)}")
    difference = (seen.double() - expected.double()).norm()
    return float(difference / expected.double().norm().clamp_min(1e-30))


class _Cache:
    """Cache tensors of a decoder, one row per sequence."""

    def __init__(self, inputs: tuple[Input, ...], rows: int) -> None:
        # Slots nobody may see hold large values, so that a wrong mask shows.
        self.tensors = {
            i.name: torch.full([rows, *(evaluate(s, {}) for s in i.type.shape[1:])], 50.0)
            for i in inputs
            if i.role == "cache"
        }

    def row(self, start: int, stop: int) -> dict[str, torch.Tensor]:
        return {name: tensor[start:stop] for name, tensor in self.tensors.items()}


def _compare_decoder(runs: Mapping[str, Executor], model: torch.nn.Module, config: Any) -> list[Comparison]:
    """Prefill rows of different lengths one by one, then decode them together; and a batched prefill."""
    total, lengths = 11, (1, 6)
    generator = torch.Generator().manual_seed(1)
    vocabulary = int(config.get_text_config().vocab_size)
    ids = torch.randint(0, vocabulary, (len(lengths), total), generator=generator)
    with torch.no_grad():
        expected = model(input_ids=ids, use_cache=False).logits
    some = next(iter(runs.values()))
    cache = _Cache(some.program.inputs, len(lengths))
    found: list[Comparison] = []
    prefill, decode = runs.get("prefill"), runs.get("decode")
    if prefill is not None:
        for first, last, length in ((0, 2, total), (0, 1, lengths[0]), (1, 2, lengths[1])):
            logits = _prefill(prefill, ids[first:last, :length], cache.row(first, last))
            what = f"logits at batch {last - first}, sequence {length}"
            found.append(Comparison("prefill", what, _error(logits, expected[first:last, length - 1 : length])))
            if last - first == 2:  # whatever the longer prompt left behind must not be seen either
                cache = _Cache(prefill.program.inputs, len(lengths))
    if decode is not None:
        at = lengths if prefill is not None else (0, 0)
        found += _compare_decode(decode, ids, expected, cache, at)
    return found


def _prefill(prefill: Executor, ids: torch.Tensor, cache: Mapping[str, torch.Tensor]) -> torch.Tensor:
    batch, length = ids.shape
    positions = torch.arange(length).expand(batch, -1).contiguous()
    index = torch.tensor([length - 1])
    return prefill.run({"input_ids": ids, "positions": positions, "logits_index": index, **cache})["logits"]


def _compare_decode(
    decode: Executor, ids: torch.Tensor, expected: torch.Tensor, cache: _Cache, at: tuple[int, ...]
) -> list[Comparison]:
    rows, total = ids.shape
    found: list[Comparison] = []
    for step in range(total - max(at)):
        positions = torch.tensor([[a + step] for a in at])
        row = torch.arange(rows)[:, None]
        given = {"input_ids": ids[row, positions], "positions": positions, **cache.row(0, rows)}
        logits = decode.run(given)["logits"]
        what = f"logits at batch {rows}, positions {positions.flatten().tolist()}"
        found.append(Comparison("decode", what, _error(logits, expected[row, positions])))
    for position in range(at[0] + total - max(at), total):  # the shorter row goes on alone
        positions = torch.tensor([[position]])
        given = {"input_ids": ids[:1, position : position + 1], "positions": positions, **cache.row(0, 1)}
        logits = decode.run(given)["logits"]
        found.append(
            Comparison(
                "decode",
                f"logits at batch 1, position {position}",
                _error(logits, expected[:1, position : position + 1]),
            )
        )
    return found


def _compare_forward(run: Executor, model: torch.nn.Module) -> list[Comparison]:
    """Compare at sizes the trace did not use, and at 1."""
    found: list[Comparison] = []
    program = run.program
    for base in (1, 3):
        sizes = {s.name: min(max(base * (1 + i), s.minimum), s.maximum) for i, s in enumerate(program.symbols)}
        given = {i.name: _fill(i, sizes, seed) for seed, i in enumerate(program.inputs)}
        seen = run.run(given)
        with torch.no_grad():
            expected = model(**given, **forward_settings(model))
        for output in program.outputs:
            what = ", ".join(f"{k} {v}" for k, v in sizes.items())
            found.append(
                Comparison(program.name, f"{output.name} at {what}", _error(seen[output.name], expected[output.name]))
            )
    return found


def _fill(input_: Input, sizes: Mapping[str, int], seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    shape = [evaluate(s, sizes) for s in input_.type.shape]
    if input_.name.endswith("mask"):  # right padding, different in every row
        mask = torch.ones(shape, dtype=getattr(torch, input_.type.dtype))
        for row in range(1, shape[0]):
            mask[row, max(1, shape[1] - row) :] = 0
        return mask
    if input_.type.dtype.startswith(("int", "uint")):
        high = 2 if input_.values is None else evaluate(input_.values.high, sizes) + 1
        return torch.randint(0, high, shape, generator=generator, dtype=getattr(torch, input_.type.dtype))
    return torch.randn(shape, generator=generator)
