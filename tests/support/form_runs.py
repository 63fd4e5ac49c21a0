"""Random inputs of a concrete form, its body run with ATen, and the error measure the tuner uses."""

import math
from typing import Any

import torch

from tune_model.runtime.execution.invoke import prepare_call
from tune_model.runtime.program import Call, Form
from tune_model.runtime.replay import contiguous_strides


def empty(type_: Any) -> torch.Tensor:
    """A tensor of a concrete type whose every element is NaN, or the largest integer."""
    dtype = getattr(torch, type_.dtype)
    strides = type_.strides or contiguous_strides(type_.shape)
    span = 1 + sum((n - 1) * s for n, s in zip(type_.shape, strides, strict=True))
    fill = math.nan if dtype.is_floating_point else (True if dtype == torch.bool else torch.iinfo(dtype).max)
    return torch.full((max(span, 0),), fill, dtype=dtype).as_strided(type_.shape, strides)


def call(step: Call, slots: dict[str, torch.Tensor]) -> None:
    """Run one operator over slots."""
    names = list(slots) + [r for r in step.results if r is not None and r not in slots]
    values: list[Any] = [*slots.values(), *([None] * (len(names) - len(slots)))]
    prepare_call(step, {n: i for i, n in enumerate(names)}, next(iter(slots.values())).device)(values)
    slots.update({n: v for n, v in zip(names, values, strict=True) if v is not None})


def run_body(form: Form, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
    """The form's own sequence."""
    slots = dict(zip((p.name for p in form.parameters), inputs, strict=True))
    for step in form.body:
        call(step, slots)
    return [slots[r.name] for r in form.results]


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Relative Frobenius error; NaN counts as infinitely wrong."""
    a, e = actual.double(), expected.double()
    difference = torch.linalg.vector_norm(a - e) / torch.linalg.vector_norm(e).clamp_min(1e-30)
    return math.inf if math.isnan(difference) else difference.item()


def on_gpu(tensor: torch.Tensor) -> torch.Tensor:
    """Copy to the GPU, laid out as it is: `cuda()` closes the gaps between strides, which kernels were built for."""
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cuda").copy_(tensor)


def fill(form: Form, seed: int = 0) -> list[torch.Tensor]:
    """Random inputs laid out as a form's parameters say."""
    generator = torch.Generator().manual_seed(seed)
    tensors = []
    for parameter in form.parameters:
        tensor = empty(parameter.type)
        if tensor.is_floating_point():
            scale = (
                parameter.type.shape[-1] ** -0.5
                if parameter.role == "weight" and len(parameter.type.shape) == 2
                else 1.0
            )
            tensor.copy_(torch.randn(tuple(tensor.shape), generator=generator) * scale)
        elif parameter.values is not None:
            low, high = parameter.values.low, parameter.values.high
            tensor.copy_(torch.randint(low, high + 1, tuple(tensor.shape), generator=generator))
        else:
            tensor.copy_(torch.randint(0, 2, tuple(tensor.shape), generator=generator))
        tensors.append(tensor)
    return tensors
