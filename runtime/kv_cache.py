"""The key and value cache: rows x max length slots per layer, allocated once, used in place."""

from collections.abc import Mapping

import torch
from torch import Tensor

from tune_model.runtime.execution.executor import InputError
from tune_model.runtime.execution.invoke import ProgramError, torch_dtype
from tune_model.runtime.expression import ExpressionError, evaluate
from tune_model.runtime.program import Input, Program

__all__ = ["KVCache", "fixed_sizes"]


class KVCache:
    """Memory for a program's cache inputs: for each one tensor of (rows, *fixed sizes), the second of which is slots.

    Zeros at first: attention reads slots that nobody sees and needs them finite. The memory never moves, so graphs are
    captured over it where it lies; it is freed with its owner: a scheduler, a single call, or an attached model, which
    lends it to one cache object after another. Whoever works on it from another stream than the last owner's waits for
    that stream first, and says so to `record_stream`.

    Args:
        program: Whose cache inputs to allocate; their first dim is the row, the others are fixed.
        rows: Sequences that fit.
        device: Where.

    Attributes:
        rows: As given.
        max_length: Slots of a row.

    Raises:
        ProgramError: A size besides the rows is not fixed.
    """

    def __init__(self, program: Program, rows: int, device: torch.device) -> None:
        self.rows = rows
        self.max_length = 0
        self._tensors: dict[str, Tensor] = {}
        self._views: dict[tuple[int, int], Mapping[str, Tensor]] = {}
        for item in program.inputs:
            if item.role == "cache":
                shape = fixed_sizes(item)
                self.max_length = shape[1]
                self._tensors[item.name] = torch.zeros(
                    (rows, *shape), dtype=torch_dtype(item.type.dtype), device=device
                )

    def slice(self, start: int, stop: int) -> Mapping[str, Tensor]:
        """Return the cache inputs for rows `start` to `stop`, in place.

        Raises:
            InputError: The cache has no such rows.
        """
        if not 0 <= start < stop <= self.rows:
            raise InputError(f"cache rows {start} to {stop} asked for; the cache has {self.rows}")
        views = self._views.get((start, stop))
        if views is None:
            views = self._views[start, stop] = {name: tensor[start:stop] for name, tensor in self._tensors.items()}
        return views

    def copy_row(self, source: int, target: int, length: int) -> None:
        """Copy the first `length` slots of a row to another row."""
        for tensor in self._tensors.values():
            tensor[target, :, :length].copy_(tensor[source, :, :length])

    def record_stream(self, stream: torch.cuda.Stream) -> None:
        """Keep the memory, when it is freed, from being used again before this stream is done with it."""
        for tensor in self._tensors.values():
            tensor.record_stream(stream)

    @property
    def size_bytes(self) -> int:
        """Memory it occupies."""
        return sum(tensor.nbytes for tensor in self._tensors.values())


def fixed_sizes(item: Input) -> tuple[int, ...]:
    """Return the sizes of a cache input after the first, its rows.

    Raises:
        ProgramError: One depends on a symbol.
    """
    try:
        return tuple(evaluate(size, {}) for size in item.type.shape[1:])
    except ExpressionError as error:
        raise ProgramError(f"cache input {item.name!r} has a size that is not fixed: {error}") from error
