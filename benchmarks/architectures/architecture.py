"""One architecture to try: a configuration as a user writes it, small enough to be tuned in seconds."""

from collections.abc import Mapping
from typing import Any, Final, NamedTuple

__all__ = ["SIZES", "Architecture", "decoder", "encoder", "single_pass"]

SIZES: Final[dict[str, Any]] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 128,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
"""Two layers of everything; windows are shorter than the prompts, so that they matter."""


class Architecture(NamedTuple):
    """A row of the table.

    Attributes:
        name: transformers' model type, and what of the model where that is not all of it.
        known: Models that people know of this architecture.
        document: As a configuration file holds it.
    """

    name: str
    known: str
    document: Mapping[str, Any]

    @property
    def task(self) -> str:
        """Its task."""
        return str(self.document["task"])


def decoder(model_type: str, known: str, /, *, name: str = "", **fields: Any) -> Architecture:
    """A causal language model: prefill, and decode over a cache.

    Args:
        model_type: transformers' name.
        known: Models people know.
        name: Of the row, where the type does not tell it apart.
        fields: Of its config.json, over `SIZES`; `None` leaves one out.
    """
    workload = {
        "max_length": 48,
        "max_batch": 4,
        "prefill": {"batch": [1], "sequence": [16]},
        "decode": {"batch": [2], "context": [20]},
    }
    config = _fields(model_type, {"num_key_value_heads": 2, **fields})
    return Architecture(name or model_type, known, _document(config, "causal-lm", workload))


def encoder(model_type: str, known: str, /, *, architecture: str | None = None, **fields: Any) -> Architecture:
    """A model of `input_ids` and `attention_mask`."""
    workload = {"forward": {"batch": [2], "sequence": [16]}}
    name = model_type if architecture is None else f"{model_type} ({architecture})"
    return Architecture(name, known, _document(_fields(model_type, fields), "encoder", workload, architecture))


def single_pass(
    model_type: str,
    known: str,
    /,
    *,
    architecture: str | None = None,
    inputs: Mapping[str, tuple[list[int | str], str]] | None = None,
    grid: Mapping[str, list[int]] | None = None,
    fields: Mapping[str, Any],
) -> Architecture:
    """One call of any model.

    Args:
        model_type: transformers' name.
        known: Models people know.
        architecture: The class; the type's usual one by default.
        inputs: Shape and dtype by name, where they cannot be derived.
        grid: Values of the sizes besides a batch of 2.
        fields: Of its config.json.
    """
    given = dict(grid or {})
    forward: dict[str, Any] = {"batch": [2]}
    if "sequence" in given:
        forward["sequence"] = given.pop("sequence")
    if given:
        forward["grid"] = given
    document = _document({"model_type": model_type, **fields}, "forward", {"forward": forward}, architecture)
    if inputs:
        document["model"]["inputs"] = [{"name": n, "shape": s, "dtype": d} for n, (s, d) in inputs.items()]
    name = model_type if architecture is None else f"{model_type} ({architecture})"
    return Architecture(name, known, document)


def _fields(model_type: str, fields: Mapping[str, Any]) -> dict[str, Any]:
    given = {"model_type": model_type, **SIZES, **fields}
    return {name: value for name, value in given.items() if value is not None}


def _document(
    config: dict[str, Any], task: str, workload: dict[str, Any], architecture: str | None = None
) -> dict[str, Any]:
    model: dict[str, Any] = {"source": "transformers", "config": config}
    if architecture is not None:
        model["architecture"] = architecture
    name = str(config["model_type"])
    return {"name": name, "model": model, "task": task, "dtype": "float32", "workload": workload, "target": "cpu"}
