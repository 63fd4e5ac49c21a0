"""Generate text: prefill each prompt alone, then decode all rows together, each at its own position."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from tune_model.runtime.executor import InputError
from tune_model.runtime.kv_cache import KVCache
from tune_model.runtime.program import Program
from tune_model.runtime.sampling import Sampler, Sampling

__all__ = ["Generation", "Phases", "RunProgram", "context_hint", "generate_tokens"]

RunProgram = Callable[[Mapping[str, Tensor], Mapping[str, int]], dict[str, Tensor]]
"""Runs a program on inputs and hints: an executor or a graph runner."""


class Phases(NamedTuple):
    """The two programs of a causal language model and what runs them."""

    prefill: Program
    decode: Program
    run_prefill: RunProgram
    run_decode: RunProgram


class Generation(NamedTuple):
    """What to generate.

    Attributes:
        max_new_tokens: Per row.
        eos: Tokens that end a row; they are yielded.
        sampling: How tokens are picked.
    """

    max_new_tokens: int
    eos: frozenset[int] = frozenset()
    sampling: Sampling = Sampling()


def context_hint(program: Program, length: int) -> dict[str, int]:
    """Return the hint that tells a decode program how long its contexts are.

    Rounded up to a power of two, so that a growing context asks for few plans.
    """
    for symbol in program.symbols:
        if symbol.name == "context" and symbol.input is None:
            rounded = 1 << max(length - 1, 0).bit_length()
            return {"context": min(max(rounded, symbol.minimum), symbol.maximum)}
    return {}


def prefill(phases: Phases, cache: KVCache, row: int, prompt: Tensor) -> Tensor:
    """Run one prompt into one row of the cache.

    Args:
        phases: The model.
        cache: Written from slot 0 of the row.
        row: Which.
        prompt: (length,) int64 on the cache's device.

    Returns:
        Logits after the last token, (1, vocabulary).
    """
    length = prompt.shape[0]
    inputs: dict[str, Tensor] = {
        "input_ids": prompt[None],
        "positions": torch.arange(length, device=prompt.device)[None],
        **cache.slice(row, row + 1),
    }
    if any(item.name == "logits_index" for item in phases.prefill.inputs):
        inputs["logits_index"] = torch.full((1,), length - 1, device=prompt.device)
    outputs = phases.run_prefill(inputs, context_hint(phases.prefill, length))
    return next(iter(outputs.values()))[:, -1]


class _Reader:
    """Reads tokens back; on CUDA through pinned memory, so that the next step is launched before they are needed."""

    def __init__(self, rows: int, device: torch.device) -> None:
        self.overlaps = device.type == "cuda"
        self._event = torch.cuda.Event() if self.overlaps else None
        self._host = torch.empty(rows, dtype=torch.int64, pin_memory=self.overlaps)

    def start(self, tokens: Tensor) -> None:
        self._host.copy_(tokens, non_blocking=self.overlaps)
        if self._event is not None:
            self._event.record()

    def finish(self) -> list[int]:
        if self._event is not None:
            self._event.synchronize()
        tokens: list[int] = self._host.tolist()
        return tokens


def generate_tokens(
    phases: Phases, cache: KVCache, prompts: Sequence[Tensor], generation: Generation
) -> Iterator[tuple[int | None, ...]]:
    """Generate one token per row and step, until every row has ended.

    Args:
        phases: The model.
        cache: With at least as many rows as prompts; the prompts take the first ones.
        prompts: (length,) int64 each, on the cache's device.
        generation: What to generate.

    Yields:
        Each row's next token; `None` once it has ended.

    Raises:
        InputError: A prompt is empty or does not fit the cache with its new tokens.
    """
    _check(cache, prompts, generation)
    if generation.max_new_tokens == 0:
        return
    rows = len(prompts)
    device = prompts[0].device
    sampler = Sampler(generation.sampling, device)
    reader = _Reader(rows, device)
    longest = max(prompt.shape[0] for prompt in prompts)
    logits = torch.cat([prefill(phases, cache, row, prompt) for row, prompt in enumerate(prompts)])
    tokens = sampler.pick(logits)
    positions = torch.tensor([[prompt.shape[0]] for prompt in prompts], device=device)
    caches = cache.slice(0, rows)
    alive = [True] * rows
    for step in range(1, generation.max_new_tokens + 1):
        reader.start(tokens)
        last = step == generation.max_new_tokens
        if reader.overlaps and not last:  # launched before this step's tokens are known: wasted if all rows end here
            tokens = _decode(phases, sampler, tokens, positions, caches, longest + step)
        read = reader.finish()
        yield tuple(token if live else None for token, live in zip(read, alive, strict=True))
        alive = [live and token not in generation.eos for token, live in zip(read, alive, strict=True)]
        if last or not any(alive):
            return
        if not reader.overlaps:
            tokens = _decode(phases, sampler, tokens, positions, caches, longest + step)


def _decode(
    phases: Phases, sampler: Sampler, tokens: Tensor, positions: Tensor, caches: Mapping[str, Tensor], context: int
) -> Tensor:
    """Run one step and move every row on by one."""
    inputs = {"input_ids": tokens[:, None], "positions": positions, **caches}
    outputs = phases.run_decode(inputs, context_hint(phases.decode, context))
    positions += 1
    return sampler.pick(next(iter(outputs.values()))[:, -1])


def _check(cache: KVCache, prompts: Sequence[Tensor], generation: Generation) -> None:
    if not prompts:
        raise InputError("no prompt given; expected at least one")
    if generation.max_new_tokens < 0:
        raise InputError(f"max_new_tokens is {generation.max_new_tokens}; expected 0 or more")
    if len(prompts) > cache.rows:
        raise InputError(f"{len(prompts)} prompts given; the cache has {cache.rows} rows")
    for i, prompt in enumerate(prompts):
        if prompt.dim() != 1 or prompt.shape[0] == 0 or prompt.dtype != torch.int64:
            seen = f"{prompt.dtype} {tuple(prompt.shape)}"
            raise InputError(f"prompt {i} is {seen}; expected at least one token in one dim, int64")
        # The last token that is generated is never run, so it needs no slot.
        needed = prompt.shape[0] + max(generation.max_new_tokens - 1, 0)
        if needed > cache.max_length:
            raise InputError(
                f"prompt {i} has {prompt.shape[0]} tokens and {generation.max_new_tokens} are to follow; "
                f"the cache holds {cache.max_length} per row"
            )
