"""What a decode step reads and advances, in device memory: each row's last token, position and sampling parameters.

One step's results are the next one's inputs where they lie, so between steps nothing travels from the host.
"""

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from tune_model.runtime.generation.sampling import Sampling, SamplingRows
from tune_model.runtime.kv_cache import KVCache

__all__ = ["RowViews", "Rows"]


class RowViews(NamedTuple):
    """The first rows, as a decode program takes them.

    Attributes:
        inputs: Of the program.
        tokens: (n, 1), where the next tokens go.
        positions: (n, 1), where the tokens in `tokens` lie in the cache.
        moving: (n, 1), 1 for rows that are in use and 0 for others, which stay where they are.
    """

    inputs: Mapping[str, Tensor]
    tokens: Tensor
    positions: Tensor
    moving: Tensor


class Rows:
    """A cache with the state of its rows; used by one thread at a time, on one CUDA stream.

    Args:
        cache: Keys and values.
        vocabulary: Tokens.
        device: Of the cache.
    """

    def __init__(self, cache: KVCache, vocabulary: int, device: torch.device) -> None:
        self.cache = cache
        self.device = device
        self.sampling = SamplingRows(cache.rows, vocabulary, cache.max_length, device)
        self._tokens, self._positions, self._moving = (
            torch.zeros(cache.rows, 1, dtype=torch.int64, device=device) for _ in range(3)
        )
        self._views: dict[int, RowViews] = {}

    def first(self, count: int) -> RowViews:
        """Return views of the first `count` rows."""
        views = self._views.get(count)
        if views is None:
            tokens, positions = self._tokens[:count], self._positions[:count]
            inputs = {"input_ids": tokens, "positions": positions, **self.cache.slice(0, count)}
            views = self._views[count] = RowViews(inputs, tokens, positions, self._moving[:count])
        return views

    def prepare(self, row: int, sampling: Sampling, prompt: Tensor, count: int) -> None:
        """Set how a row picks its next `count` tokens after its prompt."""
        self.sampling.set(row, sampling, prompt, count)

    def start(self, row: int, token: Tensor, position: int) -> None:
        """Let a row take part in steps: `token`, (1, 1), is its last one and belongs at `position`."""
        self._tokens[row : row + 1].copy_(token)
        self._positions[row].fill_(position)
        self._moving[row].fill_(1)

    def rest(self, row: int, slot: int = 0) -> None:
        """Take a row out of steps; those that run on it all the same write to `slot`, which must hold nothing yet."""
        self._positions[row].fill_(slot)
        self._moving[row].fill_(0)

    def move(self, source: int, target: int, length: int) -> None:
        """Let `target` go on where `source` is; its first `length` slots are copied, and `source` rests."""
        self.cache.copy_row(source, target, length)
        self.sampling.move(source, target)
        for tensor in (self._tokens, self._positions, self._moving):
            tensor[target].copy_(tensor[source])
        self.rest(source)

    @property
    def size_bytes(self) -> int:
        """Memory of the state without the cache."""
        return self.sampling.size_bytes + sum(t.nbytes for t in (self._tokens, self._positions, self._moving))
