"""Pick the next token of every row from its logits, on the device and without a host's decision in between.

Every row has its own parameters, in device memory, so a captured step serves any mixture of requests. A row's draw at
a position is a number fixed when the row starts, and tokens are looked up in vocabulary order: what a row draws depends
on its own logits and seed alone, never on who shares the batch.
"""

from collections.abc import Iterable
from numbers import Integral, Real
from typing import NamedTuple

import msgspec
import torch
from torch import Tensor

from tune_model.runtime.execution.executor import InputError

__all__ = ["LIKELIEST", "Needs", "Sampling", "SamplingRows", "needs_of", "pick"]

LIKELIEST = "likeliest_token"
"""The output of a decode program that is each row's most likely token, (rows, 1) int64, the first of equal ones."""

_FLOAT32 = torch.finfo(torch.float32)

_SMALLEST_DIVISOR = 1e-5
"""Of logits: lower temperatures pick the most likely token as well, but their quotients would be infinite."""

_BELOW_ONE = 1 - 2.0**-23
"""Times a sum of probabilities near 1 it is smaller than the sum, also in float32."""


class Sampling(msgspec.Struct, frozen=True):
    """How a row's tokens are picked. Applied in this order: penalty, temperature, top k, top p.

    Attributes:
        temperature: Divides the logits; 0 picks the most likely token.
        top_k: Draw from the k most likely tokens only (and those as likely as the last of them); 0 means all.
        top_p: Draw from the most likely tokens that together hold this probability.
        seed: Of the draws; equal seeds give equal tokens for equal logits.
        repetition_penalty: Divides positive logits, and multiplies negative ones, of tokens that the row already has,
            its prompt included; 1 changes nothing.

    Raises:
        InputError: A value is out of its range or of another kind.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    repetition_penalty: float = 1.0

    def __post_init__(self) -> None:
        for name, kind, expected in (
            ("temperature", Real, "a number"),
            ("top_k", Integral, "an integer"),
            ("top_p", Real, "a number"),
            ("repetition_penalty", Real, "a number"),
            ("seed", Integral, "an integer of 64 bits"),
        ):
            given: object = getattr(self, name)  # whatever the caller gave
            if isinstance(given, bool) or not isinstance(given, kind):
                raise InputError(f"sampling: {name} is {given!r}; expected {expected}")
        for name, value, legal, expected in (
            ("temperature", self.temperature, 0 <= self.temperature < float("inf"), "0 or more"),
            ("top_k", self.top_k, self.top_k >= 0, "0 or more"),
            ("top_p", self.top_p, 0 < self.top_p <= 1, "above 0 and at most 1"),
            ("repetition_penalty", self.repetition_penalty, 0 < self.repetition_penalty < float("inf"), "above 0"),
            ("seed", self.seed, -(2**63) <= self.seed < 2**63, "an integer of 64 bits"),
        ):
            if not legal:
                raise InputError(f"sampling: {name} is {value}; expected {expected}")


class Needs(NamedTuple):
    """Which parts of `pick` a batch of rows asks for; a step is captured once per value.

    Attributes:
        draws: Some row has a temperature.
        cuts: Some row draws from the most likely tokens only.
        penalises: Some row has a repetition penalty.
    """

    draws: bool = False
    cuts: bool = False
    penalises: bool = False


def needs_of(rows: Iterable[Sampling]) -> Needs:
    """Return what any of the rows needs."""
    draws = cuts = penalises = False
    for row in rows:
        draws |= row.temperature > 0
        cuts |= row.temperature > 0 and (row.top_k > 0 or row.top_p < 1)
        penalises |= row.repetition_penalty != 1
    return Needs(draws, cuts, penalises)


class SamplingRows:
    """Every row's parameters in device memory; used by one thread at a time, on one CUDA stream.

    Args:
        rows: How many.
        vocabulary: Tokens.
        slots: Positions a row may reach.
        device: Where.
    """

    def __init__(self, rows: int, vocabulary: int, slots: int, device: torch.device) -> None:
        self._vocabulary = vocabulary
        self._device = device
        self.temperature = torch.zeros(rows, 1, device=device)
        self.top_p = torch.ones(rows, 1, device=device)
        self.penalty = torch.ones(rows, 1, device=device)
        self.top_k = torch.full((rows, 1), vocabulary, device=device)
        self._draws = torch.zeros(rows, slots + 1, device=device)
        self._seen: Tensor | None = None

    @property
    def seen(self) -> Tensor:
        """Which tokens each row with a penalty has, (rows, vocabulary); allocated at first use."""
        if self._seen is None:
            shape = (self.temperature.shape[0], self._vocabulary)
            self._seen = torch.zeros(shape, dtype=torch.bool, device=self._device)
        return self._seen

    def set(self, row: int, sampling: Sampling, prompt: Tensor, count: int) -> None:
        """Prepare a row for its next `count` tokens.

        Args:
            row: Which.
            sampling: How.
            prompt: (length,) int64, what the row begins with.
            count: Tokens it may pick.
        """
        for parameter, value in (
            (self.temperature, _bounded(sampling.temperature, _SMALLEST_DIVISOR)),
            (self.top_p, _bounded(sampling.top_p, _FLOAT32.tiny)),
            (self.penalty, _bounded(sampling.repetition_penalty, _SMALLEST_DIVISOR)),
            (self.top_k, min(sampling.top_k or self._vocabulary, self._vocabulary)),
        ):
            parameter[row].fill_(value)
        if sampling.temperature > 0:
            # Drawn on the host, once: the numbers are the same on every device and in every batch.
            drawn = torch.rand(count, generator=torch.Generator().manual_seed(sampling.seed)).clamp_(max=_BELOW_ONE)
            start = prompt.shape[0]
            self._draws[row, start : start + count].copy_(drawn, non_blocking=True)
        if sampling.repetition_penalty != 1:
            self.seen[row].zero_()
            self.seen[row].index_fill_(0, prompt.to(self._device, non_blocking=True), True)

    def note(self, start: int, tokens: Tensor) -> None:
        """Remember that the rows from `start` on have these tokens, (n, 1), for their penalty."""
        self.seen[start : start + tokens.shape[0]].scatter_(1, tokens, 1)

    def move(self, source: int, target: int) -> None:
        """Give a row's parameters to another row."""
        tensors = [self.temperature, self.top_p, self.penalty, self.top_k, self._draws]
        for tensor in tensors if self._seen is None else [*tensors, self._seen]:
            tensor[target].copy_(tensor[source])

    def draws_at(self, start: int, stop: int, positions: Tensor) -> Tensor:
        """Return each row's number in [0, 1) for the token at its position; (rows, 1) both."""
        return self._draws[start:stop].gather(1, positions)

    @property
    def size_bytes(self) -> int:
        """Memory it occupies."""
        tensors = [self.temperature, self.top_p, self.penalty, self.top_k, self._draws]
        return sum(t.nbytes for t in tensors) + (0 if self._seen is None else self._seen.nbytes)


def _bounded(value: float, smallest: float) -> float:
    """Return the nearest number that a float32 holds and that is not below `smallest`; 0 stays 0."""
    return 0.0 if value == 0 else min(max(value, smallest), _FLOAT32.max)


def pick(
    logits: Tensor,
    rows: SamplingRows,
    start: int,
    positions: Tensor,
    needs: Needs,
    likeliest: Tensor | None = None,
) -> Tensor:
    """Return one token per row; changes nothing.

    Args:
        logits: (n, vocabulary) of the rows `start` to `start + n`.
        rows: Their parameters.
        start: First row.
        positions: (n, 1) int64: the slot of the token that is picked.
        needs: At least what these rows need; more changes no token.
        likeliest: (n, 1) int64: each row's most likely token by its logits, where the program has chosen it.

    Returns:
        (n, 1) int64.
    """
    stop = start + logits.shape[0]
    if not (needs.draws or needs.penalises):
        return logits.argmax(-1, keepdim=True) if likeliest is None else likeliest
    scores = logits.float()
    if needs.penalises:
        penalty = rows.penalty[start:stop]
        lowered = torch.where(scores > 0, scores / penalty, scores * penalty)
        scores = torch.where(rows.seen[start:stop], lowered, scores)
    greedy = scores.argmax(-1, keepdim=True) if needs.penalises or likeliest is None else likeliest
    token = greedy
    if needs.draws:
        temperature = rows.temperature[start:stop]
        draws = temperature > 0
        scaled = scores / torch.where(draws, temperature, 1.0)
        if needs.cuts:
            scaled = _cut(scaled, rows.top_k[start:stop], rows.top_p[start:stop])
        reached = torch.softmax(scaled, -1).cumsum(-1)
        aim = rows.draws_at(start, stop, positions) * reached[:, -1:]
        # The first token at which the sum exceeds the aim: one of probability 0 never is.
        drawn = torch.searchsorted(reached, aim, right=True).clamp_(max=logits.shape[-1] - 1)
        token = torch.where(draws, drawn, greedy)
    return token


def _cut(scores: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """Set the scores of tokens outside the top k and the top p to minus infinity; all (rows, ...)."""
    ordered = scores.sort(-1, descending=True).values
    last = ordered.gather(1, (top_k - 1).clamp_(max=scores.shape[-1] - 1))
    ordered = ordered.masked_fill(ordered < last, float("-inf"))
    probabilities = torch.softmax(ordered, -1)
    # A token stays when the more likely ones do not hold top_p yet: the most likely one always stays. Sums of floats
    # reach 1 early, so a row without top_p is exempt.
    stays = (probabilities.cumsum(-1) - probabilities < top_p) | (top_p >= 1)
    lowest = ordered.masked_fill(~stays, float("inf")).amin(-1, keepdim=True)
    return scores.masked_fill(scores < torch.maximum(lowest, last), float("-inf"))
