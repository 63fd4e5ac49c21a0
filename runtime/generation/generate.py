"""Generate text for a few prompts at once: a scheduler's steps as an iterator."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from operator import index

from torch import Tensor

from tune_model.runtime.execution.executor import InputError
from tune_model.runtime.generation.completion import Completion, CompletionFailedError, Generation
from tune_model.runtime.generation.sampling import Sampling
from tune_model.runtime.generation.scheduler import Scheduler

__all__ = ["Eos", "Prompts", "as_prompts", "each_row", "generate_tokens"]

Prompts = Sequence[Sequence[int]] | Sequence[Tensor] | Tensor
"""One or more sequences of token numbers; lengths may differ."""

Eos = int | Iterable[int] | None
"""Tokens that end a row, as configurations of models give them: several, one, or none."""


def as_prompts(prompts: object) -> Prompts:
    """Return prompts that can be counted and gone through twice.

    Raises:
        InputError: They are no sequences.
    """
    if isinstance(prompts, Tensor | Sequence) and not isinstance(prompts, str | bytes):
        if isinstance(prompts, Tensor) and prompts.dim() != 2:
            raise InputError(f"prompts is a tensor of shape {tuple(prompts.shape)}; expected (prompts, length)")
        return prompts
    if isinstance(prompts, Iterable) and not isinstance(prompts, str | bytes | Mapping):
        return list(prompts)
    raise InputError(f"prompts is a {type(prompts).__name__}; expected a list with a list of token numbers for each")


def each_row(
    rows: int, max_new_tokens: int, eos: Eos, sampling: Sampling | Sequence[Sampling] | None
) -> list[Generation]:
    """Say what each row generates.

    Args:
        rows: How many.
        max_new_tokens: Per row.
        eos: Tokens that end a row, or the one that does.
        sampling: One per row; or one for all, whose seed the rows count on from, so that equal prompts get different
            answers.

    Raises:
        InputError: There is another number of samplings than of rows, or something is of another kind.
    """
    base: object = Sampling() if sampling is None else sampling  # whatever the caller gave
    if isinstance(base, Sampling):
        drawn = [base if base.temperature == 0 else _counted(base, row) for row in range(rows)]
    elif isinstance(base, Iterable) and not isinstance(base, Mapping):
        drawn = list(base)
    else:
        raise InputError(f"sampling is a {type(base).__name__}; expected a Sampling, or a list of one per prompt")
    if len(drawn) != rows:
        raise InputError(f"{len(drawn)} samplings given for {rows} prompts; expected one for all or one for each")
    ends = _tokens(eos)
    return [Generation(max_new_tokens, ends, one) for one in drawn]


def _tokens(eos: Eos) -> frozenset[int]:
    try:
        if eos is None:
            return frozenset()
        return frozenset(index(token) for token in (eos if isinstance(eos, Iterable) else [eos]))
    except TypeError as error:
        raise InputError(f"eos is {eos!r}; expected token numbers") from error


def _counted(sampling: Sampling, row: int) -> Sampling:
    seed = (sampling.seed + row + 2**63) % 2**64 - 2**63
    return Sampling(sampling.temperature, sampling.top_k, sampling.top_p, seed, sampling.repetition_penalty)


def generate_tokens(
    scheduler: Scheduler, prompts: Prompts, generations: Sequence[Generation]
) -> Iterator[tuple[int | None, ...]]:
    """Generate with a scheduler that nobody else uses meanwhile.

    Yields:
        One token for each row that has one: `None` for a row that has ended or still waits for a place.

    Raises:
        InputError: There is no prompt, or one is empty, has numbers that are no tokens, or does not fit the cache.
    """
    if isinstance(prompts, Tensor):
        prompts = prompts.cpu()  # waits for all of them once
    if len(prompts) == 0:
        raise InputError("no prompt given; expected at least one")
    rows: list[Completion] = []
    try:
        for number, (prompt, generation) in enumerate(zip(prompts, generations, strict=True)):
            try:
                rows.append(scheduler.submit(prompt, generation))
            except InputError as error:
                raise InputError(f"prompt {number}: {error}") from error
        place = {id(completion): number for number, completion in enumerate(rows)}
        while not scheduler.idle:
            step: list[int | None] = [None] * len(rows)
            for completion, token in _step(scheduler, place):
                number = place[id(completion)]
                if step[number] is not None:  # its first token and the next arrive together
                    yield tuple(step)
                    step = [None] * len(rows)
                step[number] = token
            if any(token is not None for token in step):
                yield tuple(step)
    finally:
        scheduler.cancel(rows)
        while not scheduler.idle:  # leaves every row free for whoever is next
            scheduler.step()


def _step(scheduler: Scheduler, place: Mapping[int, int]) -> list[tuple[Completion, int]]:
    """Run a step; what ends one completion ends the generation, as itself."""
    try:
        return scheduler.step()
    except CompletionFailedError as failed:
        error, number = failed.completion.error, place[id(failed.completion)]
        reason = failed
    if error is None:
        raise reason
    error.add_note(f"while prompt {number} was read")
    raise error
