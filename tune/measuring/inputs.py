"""Random inputs for a concrete form, laid out as the form says, in as many copies as cold timing needs.

Normal numbers for activations; matrices that are weights are scaled by K^-0.5 so that results keep the size of
activations; vectors that are weights are positive (variances are among them); integers inside their stated range.
"""

import math
from collections.abc import Callable, Sequence
from typing import Final

import torch

from tune_model.extract.cost import distinct_bytes, type_bytes
from tune_model.runtime.execution.invoke import torch_dtype
from tune_model.runtime.expression import evaluate
from tune_model.runtime.program import Form, Parameter, TensorType
from tune_model.runtime.replay import contiguous_strides

__all__ = [
    "Allocate",
    "allocate",
    "copies_for",
    "copy_layout",
    "make_inputs",
    "make_outputs",
    "poison",
    "read_bytes",
    "rotates",
]

Allocate = Callable[[int, torch.dtype, torch.device], torch.Tensor]
"""Returns one-dimensional uninitialised memory for so many elements."""

_NEXT_TO_NOTHING: Final = 0.01

MAX_COPIES: Final = 128
"""Copies of small weights beyond this cost memory and start-up and change little: such tasks are bound by latency."""


def rotates(parameter: Parameter) -> bool:
    """Say whether a program meets this input cold: weights and caches, which only come round once per step."""
    return parameter.role != "activation"


def copies_for(form: Form, rotate_bytes: int) -> int:
    """Return how many sets of weights and caches make `rotate_bytes` with the activations between two uses of one.

    A call over large activations drives its weights out of the cache by itself; more copies would only make the
    shortest graph that turns through all of them long. What it reads last would still be warm when the next call reads
    it first: one copy is enough only of weights that are next to nothing beside the activations.
    """
    size = read_bytes(form)
    if size == 0:
        return 1
    streamed = sum(distinct_bytes(p) for p in (*form.parameters, *form.results) if not rotates(p))
    fewest = 1 if size < _NEXT_TO_NOTHING * streamed else min(2, math.ceil(rotate_bytes / size))
    return max(1, fewest, min(MAX_COPIES, math.ceil((rotate_bytes - streamed) / size)))


def read_bytes(form: Form) -> int:
    """Return how many bytes of weights and caches one call reads.

    Of a cache only the slots up to the position that the form's index ranges allow are read.
    """
    highest = max((_integer(p.values.high) for p in form.parameters if p.values is not None), default=0)
    total = 0
    for parameter in form.parameters:
        if not rotates(parameter):
            continue
        shape = _shape(parameter.type)
        size = type_bytes(parameter.type)
        if parameter.role == "cache" and len(shape) == 4 and shape[2] > 0:
            size = size * min(highest + 1, shape[2]) // shape[2]
        total += size
    return total


def make_inputs(form: Form, device: torch.device, seed: int, copies: int = 1) -> list[tuple[torch.Tensor, ...]]:
    """Make input sets.

    Args:
        form: Concrete.
        device: Where.
        seed: Equal seeds give equal values on equal devices.
        copies: How many sets; weights and caches are distinct memory in each, activations are shared.
    """
    generator = torch.Generator(device=device).manual_seed(seed % 2**63)
    first = tuple(_random(parameter, device, generator) for parameter in form.parameters)
    sets = [first]
    for _ in range(copies - 1):
        again = zip(form.parameters, first, strict=True)
        sets.append(tuple(copy_layout(value) if rotates(parameter) else value for parameter, value in again))
    return sets


def allocate(count: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return so many elements, uninitialised."""
    return torch.empty(count, dtype=dtype, device=device)


def make_outputs(form: Form, device: torch.device, memory: Allocate = allocate) -> list[torch.Tensor]:
    """Make result tensors; what they hold is not said (see `poison`)."""
    return [_view(_storage(result.type, device, memory), result.type) for result in form.results]


def poison(value: torch.Tensor, reference: torch.Tensor) -> None:
    """Fill with what no kernel should write, so that what is never written shows.

    That is not-a-number where the reference is a number and a number where it is none; integers and booleans are each
    another one than the reference's.
    """
    if value.shape != reference.shape:
        raise ValueError(f"a result of shape {tuple(value.shape)}; its reference has {tuple(reference.shape)}")
    if value.dtype.is_floating_point or value.dtype.is_complex:
        value.copy_(torch.where(torch.isfinite(reference), math.nan, 0.0))
    elif value.dtype == torch.bool:
        value.copy_(~reference)
    else:
        value.copy_(reference ^ 1)


def copy_layout(value: torch.Tensor, memory: Allocate = allocate) -> torch.Tensor:
    """Copy a tensor with its strides, gaps and overlaps."""
    extent = _extent(value.shape, value.stride())
    flat = memory(extent, value.dtype, value.device)
    flat.copy_(value.as_strided((extent,), (1,)))
    return as_strided_in(flat, value.shape, value.stride())


def as_strided_in(flat: torch.Tensor, shape: Sequence[int], strides: Sequence[int]) -> torch.Tensor:
    """View one-dimensional elements, which may begin anywhere in their storage, by shape and strides."""
    return flat.as_strided(shape, strides, flat.storage_offset())


def _random(parameter: Parameter, device: torch.device, generator: torch.Generator) -> torch.Tensor:
    dtype = torch_dtype(parameter.type.dtype)
    storage = _storage(parameter.type, device)
    if dtype.is_floating_point:
        _fill_real(parameter, storage, generator)
    elif dtype == torch.bool:
        # mostly true, and never false throughout: a mask that hides everything makes NaN in the baseline too
        storage.copy_(torch.rand(storage.shape, device=device, generator=generator) < 0.8)
        storage[::2] = True
    elif dtype.is_complex:
        storage.copy_(torch.randn(storage.shape, device=device, dtype=dtype, generator=generator))
    else:
        return _integers(parameter, storage, generator)
    return _view(storage, parameter.type)


def _fill_real(parameter: Parameter, storage: torch.Tensor, generator: torch.Generator) -> None:
    shape = _shape(parameter.type)
    if parameter.role == "weight" and len(shape) <= 1:
        storage.uniform_(0.5, 1.5, generator=generator)
        return
    scale = max(shape[-1], 1) ** -0.5 if parameter.role == "weight" else 1.0
    storage.normal_(0.0, scale, generator=generator)


def _integers(parameter: Parameter, storage: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Fill with integers; distinct and ascending along the last dim where the range allows it.

    Positions in a row of tokens are distinct in every real call, and two equal ones would make a race of a cache write.
    Without a stated range the values are 0 and 1: legal as flags, masks and indices.
    """
    low, high = (
        (0, 1) if parameter.values is None else (_integer(parameter.values.low), _integer(parameter.values.high))
    )
    shape = _shape(parameter.type)
    device = storage.device
    view = _view(storage.zero_(), parameter.type)
    span = high - low + 1
    last = shape[-1] if shape else 1
    if parameter.values is None or span < last or last == 1:
        values = torch.randint(low, high + 1, shape, device=device, generator=generator)
    else:
        gaps = torch.rand((*shape[:-1], last + 1), device=device, generator=generator, dtype=torch.float64)
        places = gaps.cumsum(-1)[..., :-1] / gaps.sum(-1, keepdim=True)
        values = (places * (span - last + 1)).floor().clamp_(0, span - last).long()
        values = values + torch.arange(last, device=device) + low
    storage.fill_(low)
    if storage.numel() >= view.numel():
        view.copy_(values)
    else:  # an expanded layout: several elements share memory
        storage.copy_(values.flatten()[: storage.numel()])
    return view


def _storage(type_: TensorType, device: torch.device, memory: Allocate = allocate) -> torch.Tensor:
    return memory(_extent(_shape(type_), _strides(type_)), torch_dtype(type_.dtype), device)


def _view(storage: torch.Tensor, type_: TensorType) -> torch.Tensor:
    return as_strided_in(storage, _shape(type_), _strides(type_))


def _extent(shape: tuple[int, ...], strides: tuple[int, ...]) -> int:
    if any(size == 0 for size in shape):
        return 0
    return 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))


def _shape(type_: TensorType) -> tuple[int, ...]:
    return tuple(_integer(size) for size in type_.shape)


def _strides(type_: TensorType) -> tuple[int, ...]:
    if type_.strides is None:
        return contiguous_strides(_shape(type_))
    return tuple(_integer(stride) for stride in type_.strides)


def _integer(dim: int | str) -> int:
    return evaluate(dim, {})
