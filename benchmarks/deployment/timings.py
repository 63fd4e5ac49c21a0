"""Contenders as one row of the result file: our times, and how much slower each peer is."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from bench.run import Bench

from tune_model.pipeline.bench.interleave import Contender, Timing, interleave
from tune_model.pipeline.bench.peers import Peer, prepare

__all__ = ["meet", "synchronise"]


def meet(
    bench: Bench, name: str, ours: Contender, peers: Sequence[Peer], device: torch.device, *, budget_s: float = 12.0
) -> dict[str, Any]:
    """Prepare the peers, time everybody interleaved, and flatten.

    Returns:
        `tuned_ms`, `tuned_wall_ms`, and for each peer `PEER_ms`, `PEER_wall_ms`, `PEER_ratio` (its time / ours) with
        `_low` and `_high`, its 95 % interval; `PEER_failed` for one that could not be prepared.
    """
    failed = {}

    def left_out(peer: str, why: str) -> None:
        failed[f"{peer}_failed"] = why
        bench.tell(f"  {name}: {peer} failed: {why}")

    contenders = [ours, *prepare(peers, device, left_out=left_out)]
    timings = interleave(contenders, device, rounds=200, budget_s=budget_s)
    return {**_flat(timings), **failed}


def _flat(timings: Sequence[Timing]) -> Mapping[str, Any]:
    made: dict[str, Any] = {"rounds": timings[0].rounds}
    for timing in timings:
        made[f"{timing.name}_ms"] = timing.median_ms
        made[f"{timing.name}_wall_ms"] = timing.wall_ms
        if timing is not timings[0]:
            made[f"{timing.name}_ratio"] = timing.ratio
            made[f"{timing.name}_ratio_low"] = timing.ratio_low
            made[f"{timing.name}_ratio_high"] = timing.ratio_high
    return made


def synchronise(device: torch.device) -> None:
    """Wait for a GPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
