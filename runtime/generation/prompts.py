"""Read the prompts that callers give; run them into rows of a cache, in parts and padded to lengths that repeat."""

from collections.abc import Sequence

import torch
from torch import Tensor

from tune_model.runtime.execution.executor import InputError
from tune_model.runtime.execution.lookups import first_outside
from tune_model.runtime.generation.buckets import Buckets, Chunk
from tune_model.runtime.generation.decoder import context_hint
from tune_model.runtime.generation.phases import Phases
from tune_model.runtime.kv_cache import KVCache

__all__ = ["PromptRunner", "read_prompt"]

_INTEGERS = frozenset(
    {
        *(torch.int8, torch.int16, torch.int32, torch.int64),
        *(torch.uint8, torch.uint16, torch.uint32, torch.uint64),
    }
)


def read_prompt(prompt: Sequence[int] | Tensor, limit: int | None) -> Tensor:
    """Copy a prompt to the host, where its tokens are checked: what the caller does with its memory is nothing to us.

    Waits for a prompt that lies on a device, on the caller's current stream.

    Args:
        prompt: Token numbers, of any integer dtype.
        limit: How many tokens there are; `None` where nobody knows.

    Returns:
        (length,) int64, on the host.

    Raises:
        InputError: It is empty, not a list of integers, or has a number that is no token.
    """
    try:
        given = torch.as_tensor(prompt)
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        reason = str(error).partition("\n")[0]
        raise InputError(f"a prompt cannot be read: {reason}; expected a list of token numbers") from error
    if given.dim() != 1 or given.shape[0] == 0:
        raise InputError(f"a prompt is {tuple(given.shape)}; expected at least one token in one dim, int64")
    if given.dtype not in _INTEGERS:
        raise InputError(f"a prompt is {given.dtype}; expected integers, the numbers of its tokens")
    tokens = given.detach().to("cpu", torch.int64, copy=True)
    if limit is not None and (found := first_outside(tokens, limit)) is not None:
        (place,), value = found
        raise InputError(f"token {place} of the prompt is {value}; expected 0 to {limit - 1}")
    return tokens


class PromptRunner:
    """Runs parts of prompts; not for several threads at once.

    Args:
        phases: The model.
        cache: Written in place.
        buckets: Which lengths run.
        device: Of the cache.
    """

    def __init__(self, phases: Phases, cache: KVCache, buckets: Buckets, device: torch.device) -> None:
        self._phases = phases
        self._cache = cache
        self._device = device
        self._positions = torch.arange(buckets.slots, device=device)[None]
        self._logits_index = any(item.name == "logits_index" for item in phases.prefill.program.inputs)

    def run(self, row: int, prompt: Tensor, chunk: Chunk) -> Tensor:
        """Run one part of a prompt into a row; the parts before it are there already.

        Args:
            row: Which.
            prompt: All of it, (length,) int64, on the host or on the device.
            chunk: Which part.

        Returns:
            Logits after the part's last token, (1, vocabulary).
        """
        phase = self._phases.prefill if chunk.start == 0 else self._phases.continuation
        if phase is None:
            raise AssertionError("a prompt is split only where a continuation exists")
        length = chunk.stop - chunk.start
        tokens = prompt[chunk.start : chunk.stop]
        if chunk.size > length:  # what follows the part is overwritten before anybody sees it
            tokens = torch.nn.functional.pad(tokens, (0, chunk.size - length))
        inputs = {
            "input_ids": tokens[None].to(self._device, non_blocking=True),
            "positions": self._positions[:, chunk.start : chunk.start + chunk.size],
            **self._cache.slice(row, row + 1),
        }
        last = length - 1
        if self._logits_index:
            inputs["logits_index"] = self._positions[0, last : last + 1]
            last = 0
        outputs = phase.run(inputs, context_hint(phase.program, chunk.start + chunk.size))
        return next(iter(outputs.values()))[:, last]
