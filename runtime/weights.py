"""Bind weights: find each program's weights in a checkpoint and bring them into the layout the kernels want, once."""

from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet

import torch
from torch import Tensor

from tune_model.runtime.checkpoint import Checkpoint, WeightSource, open_checkpoint
from tune_model.runtime.errors import TuneModelError
from tune_model.runtime.invoke import torch_dtype
from tune_model.runtime.layout import layout_of
from tune_model.runtime.operators import resolve
from tune_model.runtime.program import Cast, Concatenate, Pack, Program, Transform, Transpose, Weight

__all__ = ["WeightError", "bind_weights", "pack_weight", "read_sources"]

_ALIGNMENT = 64
"""Kernels may ask that a weight starts at such an address; torch's own allocations do."""

# Ends of names that share one tensor in models with tied embeddings: the output side, then the input side.
_OUTPUT_EMBEDDINGS = ("lm_head.weight", "embed_out.weight", "proj_out.weight", "predictions.decoder.weight")
_INPUT_EMBEDDINGS = (
    "embed_tokens.weight",
    "wte.weight",
    "word_embeddings.weight",
    "embed_in.weight",
    "tok_embeddings.weight",
)

_SHOWN = 5


class WeightError(TuneModelError):
    """A checkpoint does not fit the programs: names are missing, or a shape or dtype differs."""


def _tied(name: str, names: AbstractSet[str]) -> list[str]:
    """Return the names that may hold the tensor which `name` shares."""
    for own, others in ((_OUTPUT_EMBEDDINGS, _INPUT_EMBEDDINGS), (_INPUT_EMBEDDINGS, _OUTPUT_EMBEDDINGS)):
        if name.endswith(own):
            return [other for other in names if other.endswith(others)]
    return []


def _prefixes(wanted: Sequence[str], present: AbstractSet[str]) -> list[tuple[str, str]]:
    """Return every (cut, add) that may turn the wanted names into names of the checkpoint.

    A base model's own weights lack the prefix that the same weights have inside a model with a head, and vice versa.
    """
    probe = max((name for name in wanted if name not in present), key=len)
    parts = probe.split(".")
    cut = [(".".join(parts[:i]) + ".", "") for i in range(1, len(parts)) if ".".join(parts[i:]) in present]
    added = [("", name[: -len(probe)]) for name in present if name.endswith(f".{probe}")]
    return list(dict.fromkeys([*cut, *sorted(added)]))


def _find(name: str, prefix: tuple[str, str], present: AbstractSet[str]) -> str | None:
    """Return the checkpoint's name for a program's, given what to cut and add."""
    cut, add = prefix
    for candidate in (add + name.removeprefix(cut), name):
        if candidate in present:
            return candidate
    tied = _tied(name, present)
    return tied[0] if len(tied) == 1 else None


def _resolve_names(wanted: Sequence[str], present: AbstractSet[str]) -> dict[str, str]:
    """Map the names that programs use to those of the checkpoint.

    Raises:
        WeightError: Some are missing, or could be several.
    """
    found = {name: _find(name, ("", ""), present) for name in wanted}
    missing = [name for name, to in found.items() if to is None]
    if not missing:
        return {name: to for name, to in found.items() if to is not None}
    complete = []
    for prefix in _prefixes(missing, present):
        renamed = {name: to for name in wanted if (to := _find(name, prefix, present)) is not None}
        if len(renamed) == len(wanted):
            complete.append((prefix, renamed))
    if len(complete) == 1:
        return complete[0][1]
    message = f"{len(missing)} of {len(wanted)} weights are missing from the checkpoint: {_listed(missing)}"
    if complete:
        options = " or ".join(repr(add) if add else f"without {cut!r}" for (cut, add), _ in complete)
        raise WeightError(f"{message}; they could be under prefix {options}: pass the weights of one model")
    raise WeightError(f"{message}; it has {len(present)} names: {_listed(sorted(present))}")


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:_SHOWN]) + (", ..." if len(names) > _SHOWN else "")


def _transform(tensors: list[Tensor], transforms: Iterable[Transform]) -> list[Tensor]:
    for transform in transforms:
        match transform:
            case Concatenate(dim):
                tensors = [torch.cat(tensors, dim)]
            case Transpose():
                tensors = [t.transpose(-1, -2).contiguous().transpose(-1, -2) for t in tensors]
            case Cast(dtype):
                tensors = [t.to(torch_dtype(dtype)) for t in tensors]
            case Pack():
                pass
    return tensors


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


def _make(weight: Weight, sources: Sequence[str], checkpoint: Checkpoint, device: torch.device) -> Tensor:
    """Read, move, transform, check and pack one weight."""
    layout = layout_of(weight.type)
    tensors = []
    for name in sources:
        tensor = checkpoint.read(name)
        if tensor.is_meta:
            raise WeightError(f"weight {name!r} has no values (it is on the meta device)")
        if tensor.dtype != layout.dtype and not (tensor.is_floating_point() and layout.dtype.is_floating_point):
            raise WeightError(f"weight {name!r} is {tensor.dtype}; expected {layout.dtype}")
        tensors.append(tensor.to(device=device, dtype=layout.dtype))
    made = _transform(tensors, weight.transforms)
    shapes = ", ".join(f"{n} {list(checkpoint.shape(n))}" for n in sources)
    if len(made) != 1:
        raise WeightError(f"weight {weight.name!r} has {len(made)} sources and no rule to join them: {shapes}")
    tensor = made[0]
    if tuple(tensor.shape) != layout.shape:
        raise WeightError(
            f"weight {weight.name!r} is {list(tensor.shape)} (from {shapes}); expected {list(layout.shape)}"
        )
    packs = [t.layout for t in weight.transforms if isinstance(t, Pack)]
    if packs:
        return pack_weight(tensor, packs[0])
    if tensor.data_ptr() % _ALIGNMENT:
        tensor = tensor.clone()
    return tensor


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
    target = torch.device(device)
    checkpoint = open_checkpoint(source)
    weights = _by_name(programs)
    names = _source_names(weights, checkpoint)
    made: dict[tuple[tuple[str, ...], tuple[Transform, ...], str], Tensor] = {}
    bound: dict[str, Tensor] = {}
    with torch.no_grad():
        for name, weight in weights.items():
            sources = tuple(names[s] for s in weight.sources)
            key = (sources, weight.transforms, weight.type.dtype)
            if key not in made:
                made[key] = _make(weight, sources, checkpoint, target)
            bound[name] = made[key]
    return bound


def read_sources(programs: Sequence[Program], source: WeightSource) -> dict[str, Tensor]:
    """Read what the weights of all programs are made from, by the programs' names of it and before any transform.

    Raises:
        CheckpointError: The path holds no readable safetensors.
        WeightError: Names are missing.
    """
    checkpoint = open_checkpoint(source)
    names = _source_names(_by_name(programs), checkpoint)
    return {name: checkpoint.read(stored) for name, stored in names.items()}


def _source_names(weights: Mapping[str, Weight], checkpoint: Checkpoint) -> dict[str, str]:
    wanted = list(dict.fromkeys(name for weight in weights.values() for name in weight.sources))
    return _resolve_names(wanted, set(checkpoint.names())) if wanted else {}


def _by_name(programs: Sequence[Program]) -> Mapping[str, Weight]:
    weights: dict[str, Weight] = {}
    for program in programs:
        for weight in program.weights:
            known = weights.setdefault(weight.name, weight)
            if known != weight:
                raise WeightError(f"programs disagree about weight {weight.name!r}: {known} and {weight}")
    return weights
