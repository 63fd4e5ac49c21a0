"""Round sizes to few values, so that plans and graphs repeat: rows of a step, lengths of a prompt, contexts.

Pure rules over what was tuned. Padding costs time and changes nothing else: what is read past a row's or a prompt's end
is never looked at.
"""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from tune_model.runtime.program import Program

__all__ = ["Buckets", "Chunk", "Grid", "buckets_of"]

Grid = Mapping[str, Sequence[int]]
"""The values of each symbol at which a program was tuned."""

_SMALLEST = 16
"""Shortest padded prompt: the rows of the smallest matrix instruction."""


class Chunk(NamedTuple):
    """Part of a prompt that runs at once.

    Attributes:
        start: Its first token.
        stop: Past its last.
        size: Tokens that run, padding included.
    """

    start: int
    stop: int
    size: int


class Buckets(NamedTuple):
    """Which sizes run.

    Attributes:
        exact: Take rows and lengths as they are.
        rows: Of the cache.
        slots: Of each row.
        batches: Numbers of rows that were tuned for decoding.
        contexts: Context lengths that were tuned; empty where nobody knows.
        sequences: Prompt lengths that were tuned.
        chunk: Longest part of a prompt that runs at once.
    """

    exact: bool
    rows: int
    slots: int
    batches: tuple[int, ...]
    contexts: tuple[int, ...]
    sequences: tuple[int, ...]
    chunk: int

    def batch(self, rows: int) -> int:
        """Return how many rows a step runs on when the last one in use is number `rows`, counted from 1.

        A tuned number or a power of two; at most all.
        """
        if self.exact:
            return rows
        power = 1 << (rows - 1).bit_length()
        return min([power, self.rows, *(b for b in self.batches if b >= rows)])

    def batches_all(self) -> tuple[int, ...]:
        """Return every number of rows that `batch` gives."""
        return tuple(sorted({self.batch(rows) for rows in range(1, self.rows + 1)}))

    def context(self, length: int) -> int:
        """Return the context length to choose kernels by when the longest row has `length` filled slots.

        The nearest tuned one, which is what dispatch would choose; without any, the next power of two.
        """
        if self.contexts:
            return min(self.contexts, key=lambda c: (abs(math.log2((c + 1) / (length + 1))), c))
        return 1 << max(length - 1, 0).bit_length()

    def sequence(self, length: int, room: int) -> int:
        """Return how many tokens to run for `length` of a prompt.

        A tuned length, or one of four sizes per power of two (at most 25 % padding, or 15 tokens); at most `room`.
        """
        if self.exact:
            return length
        quantum = max(_SMALLEST, 1 << max(length.bit_length() - 3, 0))
        padded = -(-length // quantum) * quantum
        return min([padded, room, *(s for s in self.sequences if s >= length)])

    def chunks(self, length: int) -> list[Chunk]:
        """Split a prompt."""
        found = []
        for start in range(0, length, self.chunk):
            stop = min(start + self.chunk, length)
            found.append(Chunk(start, stop, self.sequence(stop - start, self.slots - start)))
        return found


def buckets_of(
    prefill: Program, grids: Mapping[str, Grid], *, rows: int, slots: int, exact: bool, chunked: bool
) -> Buckets:
    """Return the buckets of a language model.

    Args:
        prefill: Its symbols bound what may run.
        grids: Of the programs, by name; may be empty.
        rows: Of the cache.
        slots: Of each row.
        exact: No rounding.
        chunked: Prompts longer than the longest tuned one are split.
    """
    decode, prompt = grids.get("decode", {}), grids.get("prefill", {})
    longest = min([slots, *(s.maximum for s in prefill.symbols if s.name == "sequence")])
    sequences = tuple(sorted({s for s in prompt.get("sequence", ()) if s <= longest}))
    return Buckets(
        exact=exact,
        rows=rows,
        slots=slots,
        batches=tuple(sorted({b for b in decode.get("batch", ()) if b <= rows})),
        contexts=tuple(sorted(set(decode.get("context", ())))),
        sequences=sequences,
        chunk=sequences[-1] if chunked and sequences else longest,
    )
