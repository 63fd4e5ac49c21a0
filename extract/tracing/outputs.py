"""Names for whatever a model returns: a tensor, a tuple, a dict, a structure of them."""

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from tune_model.extract.tracing.front_end import TraceError

__all__ = ["named_outputs", "named_values"]


def named_outputs(returned: Any) -> dict[str, torch.Tensor]:
    """Name the tensors in a returned structure: keys and indices joined with `_`, `output` for a lone tensor.

    Raises:
        TraceError: There is no tensor in it.
    """
    found = {name: value for name, value in named_values(returned) if isinstance(value, torch.Tensor)}
    if not found:
        raise TraceError(f"the model returns a {type(returned).__name__} without tensors; expected at least one tensor")
    return found


def named_values(returned: Any, prefix: str = "output") -> Iterator[tuple[str, Any]]:
    """Name every leaf of a returned structure; a named field hides the prefix `output`."""
    inner = "" if prefix == "output" else f"{prefix}_"
    if isinstance(returned, Mapping):
        for key, value in returned.items():
            yield from named_values(value, f"{inner}{key}")
    elif isinstance(returned, tuple) and hasattr(returned, "_fields"):
        for key, value in zip(returned._fields, returned, strict=True):
            yield from named_values(value, f"{inner}{key}")
    elif isinstance(returned, list | tuple):
        for index, value in enumerate(returned):
            yield from named_values(value, f"{prefix}_{index}")
    elif dataclasses.is_dataclass(returned) and not isinstance(returned, type):
        for field in dataclasses.fields(returned):
            yield from named_values(getattr(returned, field.name), f"{inner}{field.name}")
    else:
        yield prefix, returned
