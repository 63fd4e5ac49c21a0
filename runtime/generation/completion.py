"""One prompt on its way to its answer: what was asked, and what has come of it so far."""

import traceback
from collections.abc import Set
from numbers import Integral
from typing import Literal

import msgspec
from torch import Tensor

from tune_model.runtime.errors import TuneModelError
from tune_model.runtime.execution.executor import InputError
from tune_model.runtime.generation.sampling import Sampling

__all__ = ["Completion", "CompletionFailedError", "Finish", "Generation"]

Finish = Literal["eos", "length", "cancelled", "error"]


class Generation(msgspec.Struct, frozen=True):
    """What to generate after a prompt.

    Attributes:
        max_new_tokens: At most.
        eos: Tokens that end it; they belong to the answer.
        sampling: How tokens are picked.

    Raises:
        InputError: The limit is negative or no integer, or something is of another kind.
    """

    max_new_tokens: int
    eos: frozenset[int] = frozenset()
    sampling: Sampling = Sampling()

    def __post_init__(self) -> None:
        count: object = self.max_new_tokens  # whatever the caller gave
        if not isinstance(count, Integral) or int(count) < 0:
            raise InputError(f"max_new_tokens is {count!r}; expected an integer, 0 or more")
        ends: object = self.eos
        if not isinstance(ends, Set) or not all(isinstance(token, Integral) for token in ends):
            raise InputError(f"eos is {ends!r}; expected a set of token numbers")
        sampling: object = self.sampling
        if not isinstance(sampling, Sampling):
            raise InputError(f"sampling is a {type(sampling).__name__}; expected a Sampling")


class Completion:
    """A prompt and its answer; changed by its scheduler alone.

    Attributes:
        prompt: (length,) int64, on the host, nobody else's.
        generation: What was asked.
        tokens: The answer so far.
        finish: Why it is complete; `None` while it is not. `tokens` may be read until then and afterwards.
        error: What went wrong where `finish` is `error`.
    """

    def __init__(self, prompt: Tensor, generation: Generation) -> None:
        self.prompt = prompt
        self.generation = generation
        self.tokens: list[int] = []
        self.finish: Finish | None = None
        self.error: BaseException | None = None

    def add(self, token: int) -> None:
        """Append a token, and note what it ends."""
        self.tokens.append(token)
        if token in self.generation.eos:
            self.finish = "eos"
        elif len(self.tokens) >= self.generation.max_new_tokens:
            self.finish = "length"

    def fail(self, error: BaseException) -> None:
        """End it because of an error, unless it is complete."""
        traceback.clear_frames(error.__traceback__)  # their tensors would live as long as the completion
        if self.finish is None:
            self.error, self.finish = error, "error"


class CompletionFailedError(TuneModelError):
    """One completion could not go on; its row is free, and the others go on with the next step.

    Attributes:
        completion: Which; its `error`, this one's cause, says what happened.
    """

    def __init__(self, completion: Completion, message: str) -> None:
        super().__init__(message)
        self.completion = completion
