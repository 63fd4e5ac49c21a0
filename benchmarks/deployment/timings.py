"""Contenders as one row of the result file: our times, and how much slower each peer is."""

import gc
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from bench.run import Bench

from tune_model.pipeline.bench.interleave import Contender, Timing, interleave

__all__ = ["Peer", "meet", "release", "synchronise"]

Peer = tuple[str, Callable[[], Callable[[], object]]]
"""A peer's name, and what prepares it and returns its call; preparing may fail, which costs this peer only."""


def meet(
    bench: Bench, name: str, ours: Contender, peers: Sequence[Peer], device: torch.device, *, budget_s: float = 12.0
) -> dict[str, Any]:
    """Prepare the peers, time everybody interleaved, and flatten.

    Returns:
        `tuned_ms`, `tuned_wall_ms`, and for each peer `PEER_ms`, `PEER_wall_ms`, `PEER_ratio` (its time / ours) with
        `_low` and `_high`, its 95 % interval; `PEER_failed` for one that could not be prepared.
    """
    contenders, failed = [ours], {}
    for peer, prepare in peers:
        try:
            run = prepare()
            run()
            synchronise(device)
        except Exception as error:  # noqa: BLE001 - a peer that runs out of memory, say, must not cost the others
            failed[f"{peer}_failed"] = f"{type(error).__name__}: {str(error).strip()[:160]}"
            bench.tell(f"  {name}: {peer} failed: {failed[f'{peer}_failed']}")
            release(device)
            continue
        contenders.append(Contender(peer, run))
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


def release(device: torch.device) -> None:
    """Free what compiled peers and graphs hold."""
    torch._dynamo.reset()
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
