"""One prompt on its way to its answer: what was asked, and what has come of it so far."""

from typing import Literal

import msgspec
from torch import Tensor

from tune_model.runtime.execution.executor import InputError
from tune_model.runtime.generation.sampling import Sampling

__all__ = ["Completion", "Finish", "Generation"]

Finish = Literal["eos", "length", "cancelled"]


class Generation(msgspec.Struct, frozen=True):
    """What to generate after a prompt.

    Attributes:
        max_new_tokens: At most.
        eos: Tokens that end it; they belong to the answer.
        sampling: How tokens are picked.

    Raises:
        InputError: The limit is negative.
    """

    max_new_tokens: int
    eos: frozenset[int] = frozenset()
    sampling: Sampling = Sampling()

    def __post_init__(self) -> None:
        if self.max_new_tokens < 0:
            raise InputError(f"max_new_tokens is {self.max_new_tokens}; expected 0 or more")


class Completion:
    """A prompt and its answer; changed by its scheduler alone.

    Attributes:
        prompt: (length,) int64.
        generation: What was asked.
        tokens: The answer so far.
        finish: Why it is complete; `None` while it is not.
    """

    def __init__(self, prompt: Tensor, generation: Generation) -> None:
        self.prompt = prompt
        self.generation = generation
        self.tokens: list[int] = []
        self.finish: Finish | None = None

    def add(self, token: int) -> None:
        """Append a token, and note what it ends."""
        self.tokens.append(token)
        if token in self.generation.eos:
            self.finish = "eos"
        elif len(self.tokens) >= self.generation.max_new_tokens:
            self.finish = "length"
