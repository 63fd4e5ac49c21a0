"""An artifact's answers beside those of the model it came from, at sizes that nothing was traced or tuned at."""

from collections.abc import Mapping
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor, nn

import tune_model
from tune_model.extract.tracing.outputs import named_outputs
from tune_model.package.read import Artifact
from tune_model.package.verification.original import build_original, original_call
from tune_model.runtime.execution.invoke import torch_dtype
from tune_model.runtime.expression import evaluate
from tune_model.runtime.program import Input, Program
from tune_model.runtime.tuned import TunedModel

__all__ = ["Compared", "compare"]

ALLOWED: Final = 1e-4
"""Relative error in float32 (Frobenius). A wrong mask, position or layout gives 1e-3 to 1."""

_LENGTHS: Final = (3, 14, 9)
_NEW_TOKENS: Final = 12


class Compared(NamedTuple):
    """What came out.

    Attributes:
        error: Largest relative error of an output.
        outputs: How many were compared.
        tokens: Greedy tokens equal to transformers', and all; `None` for a model without generation.
        wrong: What differs, in words.
    """

    error: float
    outputs: int
    tokens: tuple[int, int] | None
    wrong: list[str]


@torch.no_grad()
def compare(artifact: Artifact) -> Compared:
    """Load the artifact over the original's weights and run both."""
    original = build_original(artifact.manifest.request, None, torch.device("cpu"))
    tuned = tune_model.load(artifact.path, weights=original, device="cpu")
    decoder = "prefill" in artifact.programs
    errors = _decoder_errors(tuned, original) if decoder else _forward_errors(tuned, original)
    wrong = [f"{what}: relative error {error:.1e}" for what, error in errors.items() if not error <= ALLOWED]
    tokens = _tokens(tuned, original, wrong) if decoder else None
    return Compared(max(errors.values()), len(errors), tokens, wrong)


def _error(seen: Tensor, expected: Tensor) -> float:
    if seen.shape != expected.shape:
        return float("inf")
    return float((seen.double() - expected.double()).norm() / expected.double().norm().clamp_min(1e-30))


# ---------------------------------------------------------------------------------------------------- language models


def _decoder_errors(tuned: TunedModel, original: nn.Module) -> dict[str, float]:
    errors: dict[str, float] = {}
    for batch, length in ((1, 21), (3, 11)):
        ids = _prompt(original, batch, length)
        seen = tuned(input_ids=ids)
        assert isinstance(seen, Tensor)  # noqa: S101 (a decoder has one output)
        errors[f"logits of {batch} x {length} tokens"] = _error(seen[:, -1], original(input_ids=ids).logits[:, -1])
    return errors


def _prompt(original: nn.Module, batch: int, length: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * batch + length)
    return torch.randint(3, int(original.config.vocab_size), (batch, length), generator=generator)


def _tokens(tuned: TunedModel, original: nn.Module, wrong: list[str]) -> tuple[int, int]:
    """Continue prompts of different lengths together, and each by itself with transformers' `generate`."""
    prompts = [_prompt(original, 1, length)[0] for length in _LENGTHS]
    made = tuned.complete([prompt.tolist() for prompt in prompts], _NEW_TOKENS)
    original.generation_config.eos_token_id = None
    equal = 0
    for prompt, tokens in zip(prompts, made, strict=True):
        text = original.generate(prompt[None], max_new_tokens=_NEW_TOKENS, do_sample=False, pad_token_id=0)
        expected = text[0, len(prompt) :].tolist()
        same = sum(a == b for a, b in zip(tokens, expected, strict=True))
        if same < _NEW_TOKENS:
            wrong.append(f"greedy tokens after {len(prompt)}: {same} of {_NEW_TOKENS} are transformers'")
        equal += same
    return equal, len(_LENGTHS) * _NEW_TOKENS


# ------------------------------------------------------------------------------------------------------- single passes


def _forward_errors(tuned: TunedModel, original: nn.Module) -> dict[str, float]:
    (program,) = tuned.programs.values()
    errors: dict[str, float] = {}
    for sizes in ((1, 7), (3, 21)):
        point = _point(program, *sizes)
        inputs = {item.name: _random(item, point, seed) for seed, item in enumerate(program.inputs)}
        seen = tuned.run(program.name, inputs)
        expected = named_outputs(original_call(original, inputs)(inputs))
        at = ", ".join(f"{name} {size}" for name, size in point.items())
        for name, tensor in seen.items():
            errors[f"{name} at {at}"] = _error(*(_unpadded(t, inputs) for t in (tensor, expected[name])))
    return errors


def _point(program: Program, batch: int, length: int) -> dict[str, int]:
    """Choose sizes within what the program takes; of sound a whole number of frames more than it was tuned at."""
    wanted = {"batch": batch, "samples": 400 + 20 * length}
    return {s.name: min(max(wanted.get(s.name, length), s.minimum), s.maximum) for s in program.symbols}


def _random(item: Input, sizes: Mapping[str, int], seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    shape = [evaluate(size, sizes) for size in item.type.shape]
    dtype = torch_dtype(item.type.dtype)
    if item.name == "attention_mask":
        lengths = torch.tensor([max(1, shape[1] - 2 * row) for row in range(shape[0])])
        return (torch.arange(shape[1]) < lengths[:, None]).to(dtype)
    if dtype.is_floating_point:
        return torch.randn(shape, generator=generator).to(dtype)
    high = 2 if item.values is None else evaluate(item.values.high, sizes) + 1
    return torch.randint(3 if high > 3 else 0, high, shape, generator=generator).to(dtype)


def _unpadded(tensor: Tensor, inputs: Mapping[str, Any]) -> Tensor:
    mask = inputs.get("attention_mask")
    return tensor if mask is None or tensor.shape[: mask.dim()] != mask.shape else tensor[mask.bool()]
