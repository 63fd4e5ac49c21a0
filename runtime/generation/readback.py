"""Bring tokens to the host; on CUDA through pinned memory, so that the next step is launched before they are needed."""

from collections import deque
from collections.abc import Sequence
from typing import Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

__all__ = ["Readback"]

_T = TypeVar("_T")


class _Transfer(NamedTuple):
    owners: tuple[tuple[int, object], ...]
    host: Tensor
    event: torch.cuda.Event | None


class Readback(Generic[_T]):
    """A queue of transfers, oldest first; used by one thread at a time, on one CUDA stream.

    Args:
        rows: Tokens per transfer, at most.
        device: Where tokens are made.
    """

    def __init__(self, rows: int, device: torch.device) -> None:
        self.overlaps = device.type == "cuda"
        self._rows = rows
        self._device = device
        self._queue: deque[_Transfer] = deque()
        self._spare: list[Tensor] = []

    def __len__(self) -> int:
        return len(self._queue)

    def reserve(self) -> None:
        """Have memory for the next transfer: what takes tokens that cannot be taken twice calls this before."""
        if not self._spare:
            self._spare.append(torch.empty(self._rows, dtype=torch.int64, pin_memory=self.overlaps))

    def start(self, tokens: Tensor, owners: Sequence[tuple[int, _T]]) -> None:
        """Begin to read tokens.

        Args:
            tokens: (n, 1) int64; may be overwritten by later work on the same stream.
            owners: Which of them are wanted, with whatever the reader wants to get back beside each.
        """
        if not self._spare:
            self.reserve()
        made = self._spare.pop()
        host = made[: tokens.shape[0]]
        host.copy_(tokens[:, 0], non_blocking=True)
        event = None
        if self.overlaps:
            event = torch.cuda.Event()
            event.record(torch.cuda.current_stream(self._device))
        self._queue.append(_Transfer(tuple(owners), made, event))

    def finish(self) -> list[tuple[_T, int]]:
        """Wait for the oldest transfer; returns each owner with its token."""
        owners, host, event = self._queue[0]
        if event is not None:
            event.synchronize()
        tokens = host.tolist()
        self._queue.popleft()
        self._spare.append(host)
        return [(owner, tokens[place]) for place, owner in owners]  # type: ignore[misc] # put there by start
