"""Compares programs with the eager model, on a small copy with real random weights.

The copy goes through the same tracing and rewriting as the model itself and runs in the runtime's executor; the
reference is transformers' own eager attention over whole sequences, so caches, positions, masks and rewrites are all
checked against something that has none of them. It runs on sizes that the trace never saw, 1 among them.
"""

import copy
from collections.abc import Callable, Mapping
from functools import partial
from inspect import signature
from typing import Any, NamedTuple

import msgspec
import torch
from torch.utils import _pytree as pytree

from tune_model.extract.checking.shrink import small_configs
from tune_model.extract.request import ExportedSource, FactorySource, Phase, Request, TransformersSource
from tune_model.extract.tracing.build import build_factory, build_real, load_config, make_fake
from tune_model.extract.tracing.exported import ExportedModule, load_exported, trace_exported
from tune_model.extract.tracing.front_end import SourceError, Trace, TraceError
from tune_model.extract.tracing.import_arguments import dtype_name
from tune_model.extract.tracing.module import call_by_name, module_inputs, trace_built
from tune_model.extract.tracing.outputs import named_outputs
from tune_model.extract.tracing.transformers_model import forward_settings, trace_config
from tune_model.runtime.execution.executor import Executor
from tune_model.runtime.expression import evaluate
from tune_model.runtime.program import Input, Program
from tune_model.runtime.replay import Replay
from tune_model.runtime.weights.checkpoint import WeightSource
from tune_model.runtime.weights.transforms import bind_weights

__all__ = ["Comparison", "EquivalenceError", "Lower", "check_equivalence", "compared_in", "randomise"]

TOLERANCE = 1e-5
"""Relative error (Frobenius) allowed in float32. Wrong masks, positions and layouts give 1e-3 to 1."""

_SAVED_TOLERANCE = {"float16": 5e-3, "bfloat16": 4e-2}
"""The same of saved programs, which keep their dtype: a rounding in another place moves a network by several units."""

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
    """Compare the programs of a model, or of a small copy of a transformers model, with the model itself.

    Args:
        request: As given to the front ends.
        lower: What is done to a trace afterwards (rewrites, regions); the result is what is compared.

    Returns:
        Every comparison made; empty when the model is too large to run here.

    Raises:
        EquivalenceError: One differs by more than is allowed.
    """
    comparisons: list[Comparison] = []
    dtype = compared_in(request)
    allowed = _SAVED_TOLERANCE.get(dtype, TOLERANCE)
    match request.source:
        case TransformersSource():
            found = _small_model(request.source, load_config(request.source), request.task)
            if found is not None:
                comparisons = _check_small(request, lower, *found)
        case FactorySource():
            comparisons = _check_factory(request, request.source, lower)
        case ExportedSource():
            comparisons = _check_exported(request, request.source, lower)
    for comparison in comparisons:
        if not comparison.error <= allowed:
            raise EquivalenceError(
                f"{comparison.program}, {comparison.what}: the program differs from the eager model by"
                f" {comparison.error:.1e} (relative, {dtype}, random weights); expected at most {allowed:.0e}. The"
                " model does something that tracing misses, so its programs would be wrong"
            )
    return tuple(comparisons)


def compared_in(request: Request) -> str:
    """Return the dtype that a model is compared in: a saved program's own, else float32."""
    return request.dtype or "float32" if isinstance(request.source, ExportedSource) else "float32"


def _check_small(request: Request, lower: Lower, config: Any, model: torch.nn.Module) -> list[Comparison]:
    traces = _trace_small(request, config)
    runs = _executors([lower(t) for t in traces], model)
    if request.task == "causal-lm":
        return compare_decoder(runs, model, config)
    call = partial(model, **forward_settings(model))
    return [c for run in runs.values() for c in _compare_forward(run, call, _own_sizes(run.program))]


def _trace_small(request: Request, config: Any) -> tuple[Trace, ...]:
    """Trace a small copy; empty when its inputs, whose fixed sizes are the large model's, do not fit it."""
    small = _small_request(request)
    source = TransformersSource(config={}, architecture=request.source.architecture)  # type: ignore[union-attr]
    if not request.inputs:
        return trace_config(small, source, config)
    try:
        traces = trace_config(msgspec.structs.replace(small, inputs=()), source, config)
        if {i.name for i in traces[0].program.inputs} == {i.name for i in request.inputs}:
            return traces
    except (SourceError, TraceError):
        pass  # its own inputs cannot be derived, are not all, or have sizes of other names
    try:
        return trace_config(small, source, config)
    except TraceError:
        return ()


def _check_factory(request: Request, source: FactorySource, lower: Lower) -> list[Comparison]:
    module = build_factory(source, "float32", real=True)
    if sum(p.numel() for p in module.parameters()) > PARAMETERS_AT_MOST:
        return []
    inputs = tuple(i._replace(dtype=torch.float32) if i.dtype.is_floating_point else i for i in module_inputs(request))
    traces = trace_built(request, make_fake(_skeleton(module)), inputs, f"the module of {source.factory}")
    runs = _executors([lower(t) for t in traces], module)
    call = partial(call_by_name(module), module)
    sizes = _grid_sizes(request)
    return [c for run in runs.values() for c in _compare_forward(run, lambda **given: call(given), sizes)]


def _check_exported(request: Request, source: ExportedSource, lower: Lower) -> list[Comparison]:
    exported = load_exported(source.path)
    if sum(t.numel() for t in exported.state_dict.values()) > PARAMETERS_AT_MOST:
        return []
    runs = _executors([lower(t) for t in trace_exported(request)], exported.state_dict)
    module = ExportedModule(exported)
    names = [o.name for o in next(iter(runs.values())).program.outputs]

    def call(**given: torch.Tensor) -> dict[str, Any]:
        leaves = pytree.tree_leaves(module(*given.values()))
        return dict(zip(names, (leaf for leaf in leaves if isinstance(leaf, torch.Tensor)), strict=True))

    return [c for run in runs.values() for c in _compare_forward(run, call, _grid_sizes(request))]


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
    possible = _some_inputs(model)
    for given in possible:
        try:
            with torch.no_grad():
                model(**given, **forward_settings(model))
        except Exception:  # noqa: BLE001, S112 -- any failure says the same
            continue
        return True
    return not possible


def _some_inputs(model: torch.nn.Module) -> list[dict[str, torch.Tensor]]:
    """Return inputs one of which a model of words, of pictures or of both takes; none for others."""
    accepted = signature(model.forward).parameters
    words = {"input_ids": torch.zeros(1, 5, dtype=torch.int64)}
    config: Any = getattr(model, "config", None)
    pictures: dict[str, torch.Tensor] = {}
    for part in (config, getattr(config, "vision_config", None)):
        size = getattr(part, "image_size", None)
        if isinstance(size, int) and not pictures:
            pictures = {"pixel_values": torch.zeros(1, int(getattr(part, "num_channels", 3)), size, size)}
    match getattr(model, "main_input_name", ""):
        case "input_ids" if "decoder_input_ids" not in accepted:
            return [words, {**words, **pictures}] if "pixel_values" in accepted and pictures else [words]
        case "pixel_values" if pictures:
            return [pictures]
    return []


def randomise(model: torch.nn.Module, seed: int = 0) -> None:
    """Give every weight values at which nothing hides: unit gain for matrices, spread-out norms and biases."""
    generator = torch.Generator().manual_seed(seed)

    def normal(tensor: torch.Tensor) -> torch.Tensor:
        dtype = tensor.dtype if tensor.is_complex() else torch.float32
        return torch.randn(tensor.shape, generator=generator, dtype=dtype).to(tensor.dtype)

    seen: set[int] = set()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if id(parameter) in seen:
                continue
            seen.add(id(parameter))
            if parameter.numel() == 0:
                continue
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
    """Ask for small sizes, several of each symbol that has several in the grid."""
    small = {"batch": (1, 2), "sequence": (1, 7), "context": (8,)}
    asked: dict[str, set[int]] = {}
    for phase in request.phases:
        for symbol, values in phase.grid.items():
            asked.setdefault(symbol, set()).update(values)
    phases = tuple(
        Phase(p.name, {s: small.get(s, v)[-min(len(asked[s]), 2) :] for s, v in p.grid.items()}, p.weight)
        for p in request.phases
    )
    return msgspec.structs.replace(request, dtype="float32", phases=phases, max_length=16, max_batch=4)


def _executors(traces: list[Trace], weights: WeightSource) -> dict[str, Executor]:
    bound = bind_weights([t.program for t in traces], weights, "cpu")
    return {t.program.name: Executor(t.program, bound, t.constants, Replay({}), {}, "cpu") for t in traces}


def _skeleton(module: torch.nn.Module) -> torch.nn.Module:
    """Copy a module's structure and buffers but not its parameters, which tracing replaces in place."""
    memo: dict[int, Any] = {id(p): p for p in module.parameters()}
    return copy.deepcopy(module, memo)


# ---------------------------------------------------------------------------------------------------------- comparing


def _error(seen: torch.Tensor, expected: torch.Tensor) -> float:
    if seen.shape != expected.shape:
        raise EquivalenceError(f"an output has shape {tuple(seen.shape)}; the model gives {tuple(expected.shape)}")
    if seen.is_complex() != expected.is_complex():
        raise EquivalenceError(f"an output is {seen.dtype}; the model gives {expected.dtype}")
    wide = torch.complex128 if expected.is_complex() else torch.float64
    seen, expected = seen.detach().to(wide), expected.detach().to(wide)
    finite = expected.isfinite()
    if expected.numel() and not finite.any():
        raise EquivalenceError("the model gives no finite number for random inputs; there is nothing to compare with")
    # Where random inputs leave what the model is made for (the logarithm of a negative one), the program does as well.
    same = (seen == expected) | (seen.isnan() & expected.isnan())
    difference = torch.where(same, 0.0, seen - expected).norm()
    return float(difference / torch.where(finite, expected, 0.0).norm().clamp_min(1e-30))


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


def compare_decoder(runs: Mapping[str, Executor], model: torch.nn.Module, config: Any) -> list[Comparison]:
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


def _own_sizes(program: Program) -> list[dict[str, int]]:
    """Sizes that no trace uses, and 1, within what the program allows."""
    return [
        {s.name: min(max(base * (1 + i), s.minimum), s.maximum) for i, s in enumerate(program.symbols)}
        for base in (1, 3)
    ]


def _grid_sizes(request: Request) -> list[dict[str, int]]:
    """The two smallest points of the grid."""
    grid: dict[str, list[int]] = {}
    for phase in request.phases:
        for name, values in phase.grid.items():
            grid[name] = sorted({*grid.get(name, []), *values})
    return [{name: values[min(i, len(values) - 1)] for name, values in grid.items()} for i in (0, 1)]


def _compare_forward(run: Executor, call: Callable[..., Any], points: list[dict[str, int]]) -> list[Comparison]:
    found: list[Comparison] = []
    program = run.program
    for sizes in points:
        given = {i.name: _fill(i, sizes, seed) for seed, i in enumerate(program.inputs)}
        point = ", ".join(f"{k} {v}" for k, v in sizes.items()) or "fixed sizes"
        expected = _by_name(_call(call, given, f"{program.name} at {point}"), program)
        seen = run.run(given)
        for output in program.outputs:
            error = _error(seen[output.name], expected[output.name])
            if not error <= TOLERANCE:
                again = _by_name(_call(call, given, f"{program.name} at {point}"), program)
                _check_repeatable(f"{program.name}, {output.name}", again[output.name], expected[output.name])
            found.append(Comparison(program.name, f"{output.name} at {point}", error))
    return found


def _call(call: Callable[..., Any], given: Mapping[str, torch.Tensor], what: str) -> Any:
    """Run the model itself, which is code of others.

    Raises:
        EquivalenceError: It fails.
    """
    try:
        with torch.no_grad():
            return call(**given)
    except Exception as error:
        seen = f"{type(error).__name__}: {error}"
        dtypes = ", ".join(sorted({dtype_name(t) for t in given.values() if t.is_floating_point()})) or "integers"
        raise EquivalenceError(f"{what}: the model itself fails for random inputs in {dtypes}: {seen}") from error


def _check_repeatable(what: str, again: torch.Tensor, before: torch.Tensor) -> None:
    """Blame the model where it does not agree with itself.

    Raises:
        EquivalenceError: It gave something else before.
    """
    if not _error(again, before) <= TOLERANCE:
        raise EquivalenceError(
            f"{what}: the model gives something else each time it is called; expected outputs that depend on the inputs"
            " alone (no random numbers, no counters)"
        )


def _by_name(returned: Any, program: Program) -> Mapping[str, torch.Tensor]:
    """Return a model's outputs by the program's names, which tell those of parts within parts."""
    names = [output.name for output in program.outputs]
    flat = isinstance(returned, Mapping) and all(isinstance(returned.get(name), torch.Tensor) for name in names)
    return returned if flat else named_outputs(returned)


def _fill(input_: Input, sizes: Mapping[str, int], seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    shape = [evaluate(s, sizes) for s in input_.type.shape]
    if input_.name.endswith("mask"):  # right padding, different in every row
        mask = torch.ones(shape, dtype=getattr(torch, input_.type.dtype))
        if len(shape) == 2:
            for row in range(1, shape[0]):
                mask[row, max(1, shape[1] - row) :] = 0
        return mask
    if input_.type.dtype == "bool":
        return torch.randint(0, 2, shape, generator=generator).to(torch.bool)
    if input_.type.dtype.startswith(("int", "uint")):
        high = 2 if input_.values is None else evaluate(input_.values.high, sizes) + 1
        return torch.randint(0, high, shape, generator=generator, dtype=getattr(torch, input_.type.dtype))
    dtype = getattr(torch, input_.type.dtype)
    return torch.randn(shape, generator=generator, dtype=dtype if dtype.is_complex else torch.float32).to(dtype)
