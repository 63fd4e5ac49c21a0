"""The whole program against the model it came from: one forward pass per corner of the grid, and greedy generation.

Causal language models: prompts of different lengths are continued together, and every token is looked up in the
original's own logits over the same text, computed in one pass without a cache. In float32 each must be its first
choice.
"""

import itertools
from collections.abc import Iterator, Mapping
from inspect import signature
from typing import Final, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import cosine_similarity

from tune_model.extract.request import Phase, Request
from tune_model.extract.tracing.outputs import named_outputs
from tune_model.package.verification.check import Check
from tune_model.package.verification.original import original_call
from tune_model.runtime.execution.invoke import torch_dtype
from tune_model.runtime.expression import evaluate
from tune_model.runtime.program import Input, Program
from tune_model.runtime.tuned import TunedModel

__all__ = ["check_model"]

_SEED: Final = 41
_NEW_TOKENS: Final = 24
_ROWS_AT_MOST: Final = 4
_PROMPT_AT_MOST: Final = 512
_ELEMENTS_AT_MOST: Final = 1 << 26

_COSINE: Final = {"float64": 0.9999, "float32": 0.9999, "float16": 0.999, "bfloat16": 0.99}
"""Least cosine between outputs. Kernels that round elsewhere change a bf16 model's logits by about 1 %."""

_REGRET: Final = {"float32": 0.0, "float16": 0.05, "bfloat16": 0.2}
"""How far below the original's best logit a chosen token may be, in standard deviations of the logits."""


def check_model(tuned: TunedModel, original: nn.Module, request: Request) -> Iterator[Check]:
    """Compare a tuned model with the original; both on one device, with equal weights."""
    with torch.no_grad():
        if request.task == "causal-lm":
            yield from _check_decoder(tuned, original, request)
        else:
            for phase in request.phases:
                yield from _check_forward(tuned, original, request, phase)


# ------------------------------------------------------------------------------------------ encoders and forward passes


def _check_forward(tuned: TunedModel, original: nn.Module, request: Request, phase: Phase) -> Iterator[Check]:
    program = tuned.programs[phase.name]
    for point in _corners(program, phase):
        inputs = _inputs(program, point, tuned.device)
        expected = _outputs(original, inputs, program)
        found = tuned.run(phase.name, inputs)
        sizes = " ".join(f"{name}={value}" for name, value in point.items())
        for name, tensor in found.items():
            seen, wanted = _unmasked(tensor, inputs), _unmasked(expected[name], inputs)
            yield _compare(f"{phase.name} {sizes}: {name}", seen, wanted, request.dtype)


def _corners(program: Program, phase: Phase) -> list[dict[str, int]]:
    """Return the smallest and largest grid point, and one beside the grid."""
    names = [symbol.name for symbol in program.symbols if symbol.input is not None]
    ranges = {symbol.name: (symbol.minimum, symbol.maximum) for symbol in program.symbols}
    ends = {name: (min(phase.grid.get(name, (1,))), max(phase.grid.get(name, (1,)))) for name in names}
    points = [{name: end[0] for name, end in ends.items()}, {name: end[1] for name, end in ends.items()}]
    between = {name: min(max(end[0] + 1, (end[0] + end[1]) // 2 - 1), ranges[name][1]) for name, end in ends.items()}
    unique = {tuple(point.items()): point for point in [*points, between]}
    return [point for point in unique.values() if _elements(program, point) <= _ELEMENTS_AT_MOST] or points[:1]


def _elements(program: Program, point: Mapping[str, int]) -> int:
    symbols = {**{symbol.name: symbol.minimum for symbol in program.symbols}, **point}
    count = 0
    for item in program.inputs:
        size = 1
        for dim in item.type.shape:
            size *= evaluate(dim, symbols)
        count += size
    return count


def _inputs(program: Program, point: Mapping[str, int], device: torch.device) -> dict[str, Tensor]:
    symbols = {**{symbol.name: symbol.minimum for symbol in program.symbols}, **point}
    generator = torch.Generator().manual_seed(_SEED)
    return {item.name: _random(item, symbols, generator).to(device) for item in program.inputs}


def _random(item: Input, symbols: Mapping[str, int], generator: torch.Generator) -> Tensor:
    shape = tuple(evaluate(dim, symbols) for dim in item.type.shape)
    dtype = torch_dtype(item.type.dtype)
    if item.name == "attention_mask" and len(shape) != 2:
        return torch.ones(shape, dtype=dtype)
    if item.name == "attention_mask":
        # Rows of different lengths, padded on the right, the first one full.
        lengths = torch.tensor([max(1, shape[1] - row * shape[1] // (2 * shape[0])) for row in range(shape[0])])
        return (torch.arange(shape[1]) < lengths[:, None]).to(dtype)
    if dtype.is_floating_point or dtype.is_complex:
        drawn = dtype if dtype.is_complex else torch.float32
        return torch.randn(shape, generator=generator, dtype=drawn).to(dtype)
    low, high = (0, 1) if item.values is None else (evaluate(v, symbols) for v in (item.values.low, item.values.high))
    return torch.randint(low, high + 1, shape, generator=generator).to(dtype)


def _outputs(original: nn.Module, inputs: Mapping[str, Tensor], program: Program) -> dict[str, Tensor]:
    """Run the original; results by the program's names, which are transformers' or the order of what is returned."""
    made = original_call(original, inputs)(inputs)
    names = [output.name for output in program.outputs]
    for found in (made, named_outputs(made)):
        if isinstance(found, Mapping) and all(isinstance(found.get(name), Tensor) for name in names):
            return {name: found[name] for name in names}
    values = made.values() if isinstance(made, Mapping) else made if isinstance(made, tuple | list) else (made,)
    return dict(zip(names, (value for value in values if isinstance(value, Tensor)), strict=False))


def _unmasked(tensor: Tensor, inputs: Mapping[str, Tensor]) -> Tensor:
    """Drop what belongs to padding: nobody reads it, and fused kernels need not compute it the same way."""
    mask = inputs.get("attention_mask")
    if mask is None or tensor.shape[: mask.dim()] != mask.shape:
        return tensor
    return tensor[mask.bool()]


def _real(tensor: Tensor) -> Tensor:
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor


def _compare(name: str, seen: Tensor, wanted: Tensor, dtype: str) -> Check:
    least = _COSINE.get(dtype, 0.99)
    if seen.shape != wanted.shape:
        return Check(name, "failed", f"shape {tuple(seen.shape)}", f"shape {tuple(wanted.shape)}")
    if seen.is_complex() != wanted.is_complex():
        return Check(name, "failed", f"dtype {seen.dtype}", f"dtype {wanted.dtype}")
    found, reference = (_real(tensor).double().flatten() for tensor in (seen, wanted))
    numbers = torch.isfinite(reference)
    if not torch.allclose(found[~numbers], reference[~numbers], equal_nan=True):
        return Check(name, "failed", "numbers where the model has none, or others", "the same infinities and NaN")
    found, reference = found[numbers], reference[numbers]
    if not bool(reference.any()):
        nothing = not bool(found.any())
        return Check(name, "passed" if nothing else "failed", f"at most {float(found.abs().sum()):.3g}", "zeros only")
    cosine = float(cosine_similarity(found, reference, dim=0))
    size = float(found.norm() / reference.norm())
    passed = cosine >= least and abs(size - 1) <= 1 - least
    return Check(name, "passed" if passed else "failed", f"cosine {cosine:.6f}, size x{size:.4f}", f"at least {least}")


# ---------------------------------------------------------------------------------------------------- language models


class _Judged(NamedTuple):
    """Generated tokens as the original sees them: how many were its first choice, and the worst of the others."""

    first: int
    total: int
    regret: float


def _check_decoder(tuned: TunedModel, original: nn.Module, request: Request) -> Iterator[Check]:
    prefill = next((p for p in request.phases if p.name == "prefill"), None)
    length = min(_PROMPT_AT_MOST, max(prefill.grid.get("sequence", (1,))) if prefill else 32, request.max_length // 2)
    vocabulary = _vocabulary(tuned.programs["prefill"])
    generator = torch.Generator().manual_seed(_SEED)
    for rows in sorted({1, min(request.max_batch, _ROWS_AT_MOST)}):
        lengths = [max(1, length - row * length // (rows + 1)) for row in range(rows)]
        prompts = [torch.randint(0, vocabulary, (n,), generator=generator).tolist() for n in lengths]
        if rows == 1:
            yield from _check_prefill(tuned, original, prompts[0], request.dtype)
        if "decode" in tuned.programs:
            yield _check_tokens(tuned, original, prompts, request)


def _vocabulary(program: Program) -> int:
    ids = next(item for item in program.inputs if item.name == "input_ids")
    return 2 if ids.values is None else evaluate(ids.values.high, {}) + 1


def _check_prefill(tuned: TunedModel, original: nn.Module, prompt: list[int], dtype: str) -> Iterator[Check]:
    ids = torch.tensor([prompt], device=tuned.device)
    logits = tuned(input_ids=ids)
    assert isinstance(logits, Tensor)  # noqa: S101 (a decoder has one output)
    yield _compare(f"prefill of {len(prompt)} tokens: last logits", logits[0, -1], _logits(original, ids)[-1], dtype)


def _logits(original: nn.Module, ids: Tensor) -> Tensor:
    accepted = signature(original.forward).parameters
    logits: Tensor = original(ids, **({"use_cache": False} if "use_cache" in accepted else {})).logits[0]
    return logits


def _check_tokens(tuned: TunedModel, original: nn.Module, prompts: list[list[int]], request: Request) -> Check:
    room = min(_NEW_TOKENS, request.max_length - max(map(len, prompts)))
    made = tuned.complete(prompts, room)
    judged = [_judge(original, prompt, tokens, tuned.device) for prompt, tokens in zip(prompts, made, strict=True)]
    first, total = sum(j.first for j in judged), sum(j.total for j in judged)
    regret = max(j.regret for j in judged)
    allowed = _REGRET.get(request.dtype, 0.2)
    lengths = ", ".join(str(len(prompt)) for prompt in prompts)
    name = f"greedy tokens after prompts of {lengths}"
    seen = f"{first} of {total} the original's first choice, others at most {regret:.3f} deviations below it"
    passed = total == len(prompts) * room and regret <= allowed
    expected = "all of them" if allowed == 0 else f"at most {allowed} deviations below it"
    return Check(name, "passed" if passed else "failed", seen, expected)


def _judge(original: nn.Module, prompt: list[int], tokens: list[int], device: torch.device) -> _Judged:
    text = list(itertools.chain(prompt, tokens))
    logits = _logits(original, torch.tensor([text[:-1]], device=device))[len(prompt) - 1 :].float()
    chosen = torch.tensor(tokens, device=device)
    best = logits.max(dim=-1).values
    below = best - logits.gather(-1, chosen[:, None])[:, 0]
    first = int((logits.argmax(dim=-1) == chosen).sum())
    regret = float((below / logits.std(dim=-1)).max())
    return _Judged(first, len(tokens), regret if first < len(tokens) else 0.0)
