"""Names of a model's weights in its saved checkpoint, where transformers has renamed its modules since.

transformers keeps rules that turn a checkpoint's names into its modules' names. A folder's own names are run through
them, so a program refers to what the files hold and not to what one version of the library calls it.
"""

from pathlib import Path
from typing import Any

import torch

from tune_model.runtime.weights.checkpoint import open_checkpoint

__all__ = ["checkpoint_names"]


def checkpoint_names(model: torch.nn.Module, folder: str | None) -> dict[str, str]:
    """Return the saved name of every weight whose saved name differs from the module's.

    Args:
        model: A transformers model.
        folder: Of the checkpoint. Without one, or without safetensors in it, names are the module's.

    Raises:
        CheckpointError: The files are damaged.
    """
    if folder is None or not any(Path(folder).glob("*.safetensors")):
        return {}
    saved = set(open_checkpoint(folder).names())
    wanted = model.state_dict()
    if saved.issuperset(wanted):
        return {}
    rules = _rules(model)
    if rules is None:
        return {}
    found: dict[str, str] = {}
    for name in sorted(saved):
        renamed = rules(name, wanted)
        if renamed is not None and renamed in wanted and renamed not in saved:
            found[renamed] = name
    return found


def _rules(model: Any) -> Any:
    """Return how this transformers renames a saved weight; `None` where a version has no such rules."""
    try:
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import WeightRenaming, rename_source_key
    except ImportError:
        return None
    conversions = get_model_conversion_mapping(model)
    renamings = [c for c in conversions if isinstance(c, WeightRenaming)]
    others = [c for c in conversions if not isinstance(c, WeightRenaming)]

    def rename(name: str, wanted: dict[str, torch.Tensor]) -> str | None:
        renamed, conversion = rename_source_key(name, renamings, others, model.base_model_prefix, wanted)
        return str(renamed) if conversion is None else None  # merged or split weights have no single name

    return rename
