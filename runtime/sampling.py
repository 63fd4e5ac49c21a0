"""Pick the next token of every row from its logits."""

import msgspec
import torch
from torch import Tensor

__all__ = ["Sampler", "Sampling"]


class Sampling(msgspec.Struct, frozen=True):
    """How tokens are picked.

    Attributes:
        temperature: Divides the logits; 0 picks the most likely token.
        top_k: Draw from the k most likely tokens only; 0 means all.
        top_p: Draw from the most likely tokens that together hold this probability.
        seed: Of the draws; equal seeds give equal tokens on equal hardware.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0


class Sampler:
    """Draws tokens; keeps the state of the generator between steps.

    Args:
        sampling: How.
        device: Where the logits are.
    """

    def __init__(self, sampling: Sampling, device: torch.device) -> None:
        self._sampling = sampling
        self._generator: torch.Generator | None = None
        if sampling.temperature > 0:
            self._generator = torch.Generator(device).manual_seed(sampling.seed)

    def pick(self, logits: Tensor) -> Tensor:
        """Return one token per row.

        Args:
            logits: (rows, vocabulary).

        Returns:
            (rows,) int64.
        """
        if self._generator is None:
            return logits.argmax(-1)
        sampling = self._sampling
        scores = logits.float() / sampling.temperature
        if 0 < sampling.top_k < scores.shape[-1]:
            least = scores.topk(sampling.top_k, dim=-1).values[:, -1:]
            scores = scores.masked_fill(scores < least, float("-inf"))
        probabilities = torch.softmax(scores, -1)
        if sampling.top_p < 1:
            ordered, order = probabilities.sort(-1, descending=True)
            # A token stays when the more likely ones do not hold top_p yet: the most likely one always stays.
            ordered = ordered.masked_fill(ordered.cumsum(-1) - ordered >= sampling.top_p, 0.0)
            probabilities = torch.zeros_like(probabilities).scatter_(-1, order, ordered)
        return torch.multinomial(probabilities, 1, generator=self._generator).squeeze(-1)
