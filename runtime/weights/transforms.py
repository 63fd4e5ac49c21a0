"""Bind weights: find each program's weights in a checkpoint and bring them into the layout the kernels want, once."""

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from tune_model.runtime.execution.layout import Layout, layout_of
from tune_model.runtime.operators.allowed import resolve
from tune_model.runtime.program import Cast, Concatenate, Pack, Program, Transform, Transpose, Weight
from tune_model.runtime.weights.checkpoint import Checkpoint, Scratch, WeightSource, open_checkpoint
from tune_model.runtime.weights.dense import not_dense
from tune_model.runtime.weights.names import WeightError, resolve_names

__all__ = [
    "BoundWeight",
    "WeightError",
    "bind_each",
    "bind_weights",
    "pack_weight",
    "read_sources",
    "source_views",
    "weight_packing",
    "weights_of",
]

_ALIGNMENT = 64
"""Kernels may ask that a weight starts at such an address; torch's own allocations do."""


class BoundWeight(NamedTuple):
    """A weight as kernels read it, and what it was made from.

    Attributes:
        names: What programs call it; several where they make the same of the same.
        weight: One of them.
        sources: The checkpoint's names.
        origins: The sources themselves where they were in memory; `None` for those read from files.
        tensor: On the device, after all transforms.
    """

    names: tuple[str, ...]
    weight: Weight
    sources: tuple[str, ...]
    origins: tuple[Tensor | None, ...]
    tensor: Tensor


def weight_packing(weight: Weight) -> str | None:
    """Return the library's own layout that a weight is packed in, if it is."""
    return next((t.layout for t in weight.transforms if isinstance(t, Pack)), None)


def pack_weight(tensor: Tensor, layout: str) -> Tensor:
    """Bring a matrix into a library's own layout.

    Args:
        tensor: Rows are outputs.
        layout: As in `Pack`.

    Raises:
        WeightError: There is no such layout.
    """
    kind, _, rows = layout.partition(":")
    if kind == "mkldnn" and not rows:
        packed: Tensor = resolve("mkldnn._reorder_linear_weight.default")(tensor.contiguous())
    elif kind == "mkl" and rows.isdigit():
        packed = resolve("mkl._mkl_reorder_linear_weight.default")(tensor.contiguous(), int(rows))
    else:
        raise WeightError(f"weights are to be packed as {layout!r}; expected mkldnn or mkl:ROWS")
    return packed


def _allocate(layout: Layout, transforms: Sequence[Transform], scratch: Scratch) -> Tensor:
    """Allocate a weight, or borrow memory for one that is packed; transposes turn its last two dims in memory."""
    turned = sum(isinstance(t, Transpose) for t in transforms) % 2 == 1
    shape = (*layout.shape[:-2], layout.shape[-1], layout.shape[-2]) if turned else layout.shape
    if any(isinstance(t, Pack) for t in transforms):
        made = scratch.take(shape, layout.dtype)
    else:
        made = torch.empty(shape, dtype=layout.dtype, device=scratch.device)
    return made.transpose(-1, -2) if turned else made


def source_views(weight: Weight, tensor: Tensor, shapes: Sequence[tuple[int, ...]]) -> list[Tensor]:
    """Return the part of a weight that each of its sources became, as views.

    Args:
        weight: Not packed: a packed tensor has no parts.
        tensor: Its shape after the transforms.
        shapes: Of the sources.

    Raises:
        WeightError: The sources do not make up the weight.
    """
    joins = [t.dim for t in weight.transforms if isinstance(t, Concatenate)]
    expected, listed = (
        list(tensor.shape),
        ", ".join(f"{n} {list(s)}" for n, s in zip(weight.sources, shapes, strict=True)),
    )
    if len(shapes) != 1 and len(joins) != 1:
        raise WeightError(f"weight {weight.name!r} has {len(shapes)} sources and no rule to join them: {listed}")
    if len(shapes) == 1:
        seen, parts = list(shapes[0]), [tensor]
    else:
        seen = list(shapes[0])
        seen[joins[0]] = sum(shape[joins[0]] for shape in shapes)
        if seen == expected:
            parts = list(tensor.split([shape[joins[0]] for shape in shapes], joins[0]))
    if seen != expected or any(part.shape != shape for part, shape in zip(parts, shapes, strict=True)):
        raise WeightError(f"weight {weight.name!r} is {seen} (from {listed}); expected {expected}")
    return parts


def _check(weight: Weight, sources: Sequence[str], checkpoint: Checkpoint) -> None:
    """Compare what a weight is made from with its type, without reading anything.

    Raises:
        WeightError: A source does not fit.
    """
    layout = layout_of(weight.type)
    for name in sources:
        held = checkpoint.held(name)
        if held is not None and (seen := not_dense(held)) is not None:
            raise WeightError(f"weight {name!r} is {seen}; expected a dense tensor ({torch.strided}) of {layout.dtype}")
        dtype = checkpoint.dtype(name)
        if held is not None and held.is_meta:
            raise WeightError(f"weight {name!r} has no values (it is on the meta device)")
        if dtype != layout.dtype and not (dtype.is_floating_point and layout.dtype.is_floating_point):
            raise WeightError(f"weight {name!r} is {dtype}; expected {layout.dtype}")
    source_views(weight, torch.empty(layout.shape, device="meta"), [checkpoint.shape(name) for name in sources])


def _make(weight: Weight, sources: Sequence[str], checkpoint: Checkpoint, scratch: Scratch) -> Tensor:
    """Read, move, transform and pack one weight whose sources fit.

    A tensor that needs none of this stays the checkpoint's own memory. Otherwise sources are read straight into their
    places, so that this takes little more memory than the weight.

    Raises:
        CheckpointError: A file is cut off.
    """
    layout = layout_of(weight.type)
    plain = all(isinstance(t, Cast | Pack) for t in weight.transforms) and len(sources) == 1
    kept = checkpoint.held(sources[0]) if plain else None
    packing = weight_packing(weight)
    as_is = kept is not None and kept.device == scratch.device and kept.dtype == layout.dtype and kept.is_contiguous()
    # torch notes signs and conjugation beside the memory, which is what kernels read.
    if kept is not None and as_is and not (kept.is_neg() or kept.is_conj()):
        tensor = kept.detach()
        if packing is None and tensor.data_ptr() % _ALIGNMENT:
            tensor = tensor.clone()
    else:
        tensor = _allocate(layout, weight.transforms, scratch)
        shapes = [checkpoint.shape(name) for name in sources]
        for name, part in zip(sources, source_views(weight, tensor, shapes), strict=True):
            checkpoint.copy_to(name, part)
    return tensor if packing is None else pack_weight(tensor, packing)


def bind_each(programs: Sequence[Program], source: WeightSource, device: torch.device | str) -> Iterator[BoundWeight]:
    """Make the weights of all programs one by one, equal ones once; see `bind_weights`.

    Names, shapes and dtypes of all are checked before the first is made: whoever writes over weights in use can rely on
    the rest.

    Raises:
        CheckpointError: The path holds no readable safetensors.
        WeightError: The checkpoint does not fit.
    """
    scratch = Scratch(torch.device(device))
    checkpoint, names = _checked(programs, source)
    groups: dict[tuple[tuple[str, ...], tuple[Transform, ...], str], list[Weight]] = {}
    for weight in weights_of(programs).values():
        sources = tuple(names[s] for s in weight.sources)
        groups.setdefault((sources, weight.transforms, weight.type.dtype), []).append(weight)
    for (sources, _, _), weights in groups.items():
        with torch.no_grad():
            tensor = _make(weights[0], sources, checkpoint, scratch)
        origins = tuple(checkpoint.held(name) for name in sources)
        yield BoundWeight(tuple(w.name for w in weights), weights[0], sources, origins, tensor)


def bind_weights(programs: Sequence[Program], source: WeightSource, device: torch.device | str) -> dict[str, Tensor]:
    """Find and transform the weights of all programs; equal weights are made once and shared.

    Tensors that need no change stay the caller's own memory. Names may differ from the checkpoint's by one prefix, and
    tied embeddings are found under either name. Floating dtypes are converted to the program's.

    Args:
        programs: Whose weights to bind.
        source: A module, a state dict, or a path to safetensors.
        device: Where the weights shall lie.

    Returns:
        By the programs' names of their weights.

    Raises:
        CheckpointError: The path holds no readable safetensors.
        WeightError: The checkpoint does not fit.
    """
    return {name: bound.tensor for bound in bind_each(programs, source, device) for name in bound.names}


def read_sources(programs: Sequence[Program], source: WeightSource) -> dict[str, Tensor]:
    """Read what the weights of all programs are made from, by the programs' names of it and before any transform.

    Raises:
        CheckpointError: The path holds no readable safetensors.
        WeightError: The checkpoint does not fit.
    """
    checkpoint, names = _checked(programs, source)
    return {name: checkpoint.read(stored) for name, stored in names.items()}


def check_sources(programs: Sequence[Program], source: WeightSource) -> None:
    """Check that a checkpoint has what the weights of all programs are made from, by names, shapes and dtypes alone.

    Raises:
        CheckpointError: The path holds no readable safetensors.
        WeightError: The checkpoint does not fit.
    """
    _checked(programs, source)


def _checked(programs: Sequence[Program], source: WeightSource) -> tuple[Checkpoint, dict[str, str]]:
    """Open a checkpoint that fits, and return the names it has for the programs' names of sources."""
    checkpoint = open_checkpoint(source)
    weights = weights_of(programs).values()
    wanted = list(dict.fromkeys(name for weight in weights for name in weight.sources))
    names = resolve_names(wanted, set(checkpoint.names())) if wanted else {}
    for weight in weights:
        _check(weight, [names[name] for name in weight.sources], checkpoint)
    return checkpoint, names


def weights_of(programs: Sequence[Program]) -> Mapping[str, Weight]:
    """Return the weights of all programs by name.

    Raises:
        WeightError: Two programs want different things of one name.
    """
    weights: dict[str, Weight] = {}
    for program in programs:
        for weight in program.weights:
            known = weights.setdefault(weight.name, weight)
            if known != weight:
                raise WeightError(f"programs disagree about weight {weight.name!r}: {known} and {weight}")
    return weights
