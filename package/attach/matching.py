"""Whether a call of a module's own `forward` is one that a tuned program answers, and the answer in its form."""

from collections.abc import Mapping, Sequence
from typing import Any, get_args, get_type_hints

import torch
from torch import Tensor, nn

from tune_model.runtime.weights.dense import not_dense

__all__ = ["Unmatched", "check_settings", "check_use", "output_class", "same"]


class Unmatched(Exception):  # noqa: N818 - a reason, not a failure
    """The tuned programs do not answer this call: the original runs, and the reason is counted."""


# Arguments of transformers' `forward` that change nothing when they have one of these values.
_NEUTRAL: Mapping[str, tuple[object, ...]] = {
    "cache_position": (),  # repeats what the cache and the inputs say
    "output_attentions": (None, False),
    "output_hidden_states": (None, False),
    "return_dict": (None, True, False),
    "use_cache": (None, True, False),
}


# Fields of a configuration that stand in for arguments which are left out.
_USUAL_OUTPUTS: Mapping[str, bool] = {"output_attentions": False, "output_hidden_states": False, "return_dict": True}


def check_settings(settings: Mapping[str, object]) -> None:
    """Check the arguments that no program takes.

    Raises:
        Unmatched: One of them asks for something else.
    """
    for name, value in settings.items():
        neutral = _NEUTRAL.get(name, (None,))
        if neutral and not any(value is n for n in neutral):
            raise Unmatched(f"{name} is given")


def check_use(module: nn.Module, tensors: Sequence[Tensor], device_type: str) -> None:
    """Check that a call only wants results: programs have no dropout, no gradients, and one dtype.

    Args:
        module: Whose call it is.
        tensors: That the caller gives.
        device_type: Where the module lies: `cuda`, `cpu`.

    Raises:
        Unmatched: The module trains, somebody may want to differentiate, autocast is on, a tensor is not dense, or the
            module's configuration asks for other outputs.
    """
    if module.training:
        raise Unmatched("the module trains")
    config = getattr(module, "config", None)
    for name, usual in _USUAL_OUTPUTS.items():
        if config is not None and getattr(config, name, usual) is (not usual):
            raise Unmatched(f"the configuration has {name} {not usual}")
    for tensor in tensors:
        seen = "a meta tensor" if tensor.is_meta else not_dense(tensor)
        if seen is not None:
            raise Unmatched(f"an input is {seen}")
    if torch.is_grad_enabled() and (
        any(t.requires_grad for t in tensors) or any(p.requires_grad for p in module.parameters())
    ):
        raise Unmatched("gradients are enabled")
    if torch.is_autocast_enabled(device_type):
        raise Unmatched("autocast is on")


def same(tensor: Tensor, expected: Tensor) -> bool:
    """Compare values, with broadcasting; waits for the device."""
    return bool((tensor == expected).all())


def output_class(module: nn.Module, fields: Sequence[str]) -> Any:
    """Return the class that a transformers model's `forward` answers with.

    The one its annotation names, else the general one.
    """
    from transformers.utils import ModelOutput

    try:
        annotation = get_type_hints(type(module).forward).get("return")
    except (NameError, TypeError):  # names that exist for type checkers alone
        annotation = None
    for candidate in (annotation, *get_args(annotation)):
        is_output = isinstance(candidate, type) and issubclass(candidate, ModelOutput)
        if is_output and set(fields) <= set(candidate.__dataclass_fields__):
            return candidate
    return ModelOutput
