"""Generate text for a few prompts at once: a scheduler's steps as an iterator."""

from collections.abc import Iterator, Mapping, Sequence

from torch import Tensor

from tune_model.runtime.execution.executor import InputError
from tune_model.runtime.generation.completion import Completion, CompletionFailedError, Generation
from tune_model.runtime.generation.sampling import Sampling
from tune_model.runtime.generation.scheduler import Scheduler

__all__ = ["Prompts", "each_row", "generate_tokens"]

Prompts = Sequence[Sequence[int]] | Sequence[Tensor] | Tensor
"""One or more sequences of token numbers; lengths may differ."""


def each_row(
    rows: int, max_new_tokens: int, eos: Sequence[int], sampling: Sampling | Sequence[Sampling] | None
) -> list[Generation]:
    """Say what each row generates.

    Args:
        rows: How many.
        max_new_tokens: Per row.
        eos: Tokens that end a row.
        sampling: One per row; or one for all, whose seed the rows count on from, so that equal prompts get different
            answers.

    Raises:
        InputError: There is another number of samplings than of rows.
    """
    if sampling is None:
        sampling = Sampling()
    if isinstance(sampling, Sampling):
        base = sampling
        drawn = [base if base.temperature == 0 else _counted(base, row) for row in range(rows)]
    else:
        drawn = list(sampling)
    if len(drawn) != rows:
        raise InputError(f"{len(drawn)} samplings given for {rows} prompts; expected one for all or one for each")
    return [Generation(max_new_tokens, frozenset(eos), one) for one in drawn]


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
        for index, (prompt, generation) in enumerate(zip(prompts, generations, strict=True)):
            try:
                rows.append(scheduler.submit(prompt, generation))
            except InputError as error:
                raise InputError(f"prompt {index}: {error}") from error
        place = {id(completion): index for index, completion in enumerate(rows)}
        while not scheduler.idle:
            step: list[int | None] = [None] * len(rows)
            for completion, token in _step(scheduler, place):
                index = place[id(completion)]
                if step[index] is not None:  # its first token and the next arrive together
                    yield tuple(step)
                    step = [None] * len(rows)
                step[index] = token
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
        error, index = failed.completion.error, place[id(failed.completion)]
        reason = failed
    if error is None:
        raise reason
    error.add_note(f"while prompt {index} was read")
    raise error
