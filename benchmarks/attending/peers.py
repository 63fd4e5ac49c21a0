"""What others run for the same attention."""

from collections.abc import Sequence

import torch
from bench.arena import Contender, Run, Setting, kernel_contender
from bench.plans import task_of
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from tune_model.runtime.program import Form
from tune_model.tune.candidate import Built
from tune_model.tune.families import sdpa
from tune_model.tune.target import CudaTarget, Target

__all__ = ["backends", "masked_repeated", "sliced"]


def _append(k_cache: Tensor, v_cache: Tensor, k: Tensor, v: Tensor, positions: Tensor) -> None:
    rows = torch.arange(k.shape[0], device=k.device)
    k_cache[rows, :, positions[:, 0]] = k[:, :, 0]
    v_cache[rows, :, positions[:, 0]] = v[:, :, 0]


def _masked_repeated(inputs: Sequence[Tensor]) -> Sequence[Tensor]:
    k_cache, v_cache, k, v, positions, q = inputs
    _append(k_cache, v_cache, k, v, positions)
    group = q.shape[1] // k_cache.shape[1]
    visible = torch.arange(k_cache.shape[2], device=q.device) <= positions[:, None, :, None]
    keys, values = k_cache.repeat_interleave(group, 1), v_cache.repeat_interleave(group, 1)
    return (scaled_dot_product_attention(q, keys, values, attn_mask=visible),)


def masked_repeated() -> Contender:
    """Return what an exported graph with a static cache does: K/V repeated to all heads, all of the cache, a mask."""

    def bind(setting: Setting) -> Run:
        return lambda number: _masked_repeated(setting.sets[number])

    return Contender("masked", bind)


def sliced(length: int) -> Contender:
    """Return SDPA over the slots in use alone, grouped queries as they are: for rows of equal length."""

    def bind(setting: Setting) -> Run:
        def run(number: int) -> Sequence[Tensor]:
            k_cache, v_cache, k, v, positions, q = setting.sets[number]
            _append(k_cache, v_cache, k, v, positions)
            keys, values = k_cache[:, :, :length], v_cache[:, :, :length]
            return (scaled_dot_product_attention(q, keys, values, enable_gqa=True),)

        return run

    return Contender("sliced", bind)


def backends(form: Form, target: Target, skip: Sequence[str] = ()) -> list[Contender]:
    """Return each of ATen's backends that a form may take, under its name."""
    if not isinstance(target, CudaTarget):
        return []
    task, found = task_of(form), []
    if sdpa.FAMILY.accepts(task, target) is not None:
        return []
    for config in sdpa.FAMILY.configurations(task, target, sdpa.Effort.BALANCED):
        name = str(dict(config)["backend"])
        built = sdpa.FAMILY.build(task, config, target)
        if name not in skip and isinstance(built, Built):
            found.append(kernel_contender(name, built.kernel, built.code))
    return found
