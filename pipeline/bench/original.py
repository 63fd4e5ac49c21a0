"""The model an artifact was made from, with memory and weights: what the tuned one is compared with."""

from pathlib import Path
from typing import Any

import torch
from torch import nn

from tune_model.extract.build import build_factory, load_config, model_class, torch_dtype
from tune_model.extract.request import ExportedSource, FactorySource, Request, TransformersSource

__all__ = ["build_original"]


def build_original(request: Request, device: torch.device, weights: Path | None, *, seed: int = 0) -> nn.Module:
    """Build the original model on a device, in eval mode.

    Args:
        request: As stored in the artifact.
        device: Where.
        weights: Folder with a checkpoint that transformers loads; `None` gives seeded random weights.
        seed: Of those.

    Raises:
        SourceError: The model cannot be built.
    """
    source = request.source
    if isinstance(source, TransformersSource):
        return _transformers(source, request, device, weights, seed)
    if isinstance(source, FactorySource):
        torch.manual_seed(seed)
        return build_factory(source, request.dtype, real=True).to(device)
    assert isinstance(source, ExportedSource)  # noqa: S101 - the union has no other member
    return torch.export.load(source.path).module().to(device)


def _transformers(
    source: TransformersSource, request: Request, device: torch.device, weights: Path | None, seed: int
) -> nn.Module:
    config: Any = load_config(source)
    cls: Any = model_class(source, config, request.task)
    dtype = torch_dtype(request.dtype)
    if weights is not None:
        model: nn.Module = cls.from_pretrained(weights, dtype=dtype, local_files_only=True)
        return model.eval().to(device)
    build = cls.from_config if hasattr(cls, "from_config") else cls._from_config
    torch.manual_seed(seed)
    # Made where it will run: 8 billion random numbers take a GPU a second and a CPU minutes.
    with device, torch.no_grad():
        model = build(config, dtype=dtype)
    return model.eval()
