"""The model an artifact was made from, built again to compare with: with its weights, or with seeded random ones."""

import hashlib
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from inspect import signature
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tune_model.extract.request import FactorySource, Request, TransformersSource
from tune_model.extract.tracing.build import (
    build_factory,
    build_transformers,
    load_config,
    model_class,
    torch_dtype,
)
from tune_model.extract.tracing.exported import ExportedModule, load_exported
from tune_model.extract.tracing.front_end import UnknownAttentionError
from tune_model.package.read import Artifact
from tune_model.runtime.errors import TuneModelError
from tune_model.runtime.weights.checkpoint import WeightSource, open_checkpoint
from tune_model.runtime.weights.transforms import WeightError

__all__ = ["OriginalError", "build_original", "original_call", "weights_at_hand"]

Stored = Mapping[str, Tensor] | str | Path


class OriginalError(TuneModelError):
    """What the original model is built from is not here."""


def build_original(request: Request, weights: WeightSource | None, device: torch.device) -> nn.Module:
    """Build the model of a request, ready to run.

    Args:
        request: As extract was asked; an artifact's own has a transformers model's configuration but no folder.
        weights: What to fill it with; by default random numbers that depend on the parameters' names and shapes alone.
        device: Where it shall run.

    Raises:
        OriginalError: There is nothing to build it from.
        SourceError: transformers or the factory refuse.
        CheckpointError: The weights cannot be read.
        WeightError: They do not fit the model.
    """
    if isinstance(weights, nn.Module):
        return weights.to(device).eval()
    tensors: Stored | None = weights
    match request.source:
        case TransformersSource():
            return _transformers(request, request.source, tensors, device)
        case FactorySource():
            module = build_factory(request.source, request.dtype, real=True)
            if tensors is not None:
                _load(module, _tensors(tensors))
            return module.to(device)
        case _:
            module = _exported(request.source.path)
            if tensors is not None:
                _load(module, _tensors(tensors))
            return module.to(device)


def weights_at_hand(artifact: Artifact, request: Request) -> WeightSource | None:
    """Return the weights that need not be given: those inside, else those in the model's folder, else none."""
    embedded = artifact.weights()
    folder = getattr(request.source, "folder", None)
    if embedded is not None or folder is None or not any(Path(folder).glob("*.safetensors")):
        return embedded
    return Path(folder)


def _transformers(
    request: Request, source: TransformersSource, weights: Stored | None, device: torch.device
) -> nn.Module:
    config = load_config(source)
    if weights is None:
        return _randomise(_without_memory(request, source, config), device)
    with _quiet_transformers():
        return _load_transformers(request, source, config, weights).to(device).eval()


def _without_memory(request: Request, source: TransformersSource, config: Any) -> nn.Module:
    """Build it with torch's attention, or with its own where it takes no other (MPNet)."""
    try:
        return build_transformers(source, config, request.task, request.dtype, "sdpa")
    except UnknownAttentionError:
        return build_transformers(source, config, request.task, request.dtype, "eager")


@contextmanager
def _quiet_transformers() -> Iterator[None]:
    """Keep transformers from drawing progress bars: the terminal belongs to pipeline."""
    from transformers.utils import logging

    drawn = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if drawn:
            logging.enable_progress_bar()


def _load_transformers(request: Request, source: TransformersSource, config: Any, weights: Stored) -> nn.Module:
    cls = model_class(source, config, request.task)
    # transformers knows the older names of its checkpoints, and a state dict goes through the same conversion; but only
    # for a model's own class, which building it (without memory) tells.
    built: Any = _without_memory(request, source, config)
    options: dict[str, Any] = {
        "dtype": torch_dtype(request.dtype),
        "attn_implementation": built.config._attn_implementation,
    }
    if isinstance(weights, str | Path) and (Path(weights) / "config.json").is_file():
        return cls.from_pretrained(str(weights), local_files_only=True, **options)  # type: ignore[no-any-return]
    return type(built).from_pretrained(None, config=config, state_dict=_tensors(weights), **options)  # type: ignore[no-any-return]


def _tensors(weights: Stored) -> dict[str, Tensor]:
    checkpoint = open_checkpoint(weights)
    return {name: checkpoint.read(name) for name in checkpoint.names()}


def _load(module: nn.Module, tensors: dict[str, Tensor]) -> None:
    """Fill a module; a name that is missing or a shape that differs is the weights' fault, and said so."""
    try:
        module.load_state_dict(tensors)
    except RuntimeError as error:
        raise WeightError(f"the weights do not fit the model: {' '.join(str(error).split())}") from error


def _exported(path: str) -> nn.Module:
    if not Path(path).is_file():
        msg = f"the exported program {path} is not here; run where the configuration's model.path leads to it"
        raise OriginalError(msg)
    return ExportedModule(load_exported(path))


def original_call(original: nn.Module, names: Collection[str]) -> Callable[[Mapping[str, Tensor]], Any]:
    """Return how to call an original model with inputs of these names.

    By keyword where its forward knows the names, else in order; transformers models keep no cache and return names.
    """
    accepted = signature(original.forward).parameters
    settings = {k: v for k, v in (("use_cache", False), ("return_dict", True)) if k in accepted}
    if accepted.keys() >= set(names):
        return lambda inputs: original(**inputs, **settings)
    return lambda inputs: original(*inputs.values())


def _randomise(module: nn.Module, device: torch.device) -> nn.Module:
    """Fill a module of meta parameters: unit gain for matrices, spread-out norms and biases, so that nothing hides.

    Each tensor's numbers follow from its name, so they do not depend on the order of modules; made where they are used.
    """
    made: dict[int, nn.Parameter] = {}
    for prefix, child in module.named_modules():
        for name, parameter in child._parameters.items():
            if parameter is None:
                continue
            if id(parameter) not in made:
                full = f"{prefix}.{name}" if prefix else name
                made[id(parameter)] = nn.Parameter(_numbers(full, parameter, device), requires_grad=False)
            child._parameters[name] = made[id(parameter)]
        for name, buffer in child._buffers.items():
            if buffer is not None:
                child._buffers[name] = buffer.to(device)
    return module.eval()


def _numbers(name: str, like: Tensor, device: torch.device) -> Tensor:
    seed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:7], "big")
    generator = torch.Generator(device).manual_seed(seed)
    if like.dim() > 1:
        scale = max(like[0].numel(), 1) ** -0.5  # some have no elements, such as no register tokens
        return torch.empty(like.shape, dtype=like.dtype, device=device).normal_(0.0, scale, generator=generator)
    dtype = like.dtype if like.is_complex() else torch.float32
    tensor = torch.empty(like.shape, dtype=dtype, device=device).normal_(0.0, 0.1, generator=generator)
    return (tensor + (1.0 if name.endswith("weight") else 0.0)).to(like.dtype)
