"""What extract is asked for: a model source, a task and the workload's grid. Types only.

The pipeline makes a `Request` from a checked configuration; tests make one by hand.
"""

from typing import Any, Literal

import msgspec

from tune_model.extract.task import NumericRules

__all__ = [
    "ExportedSource",
    "FactorySource",
    "ModelInput",
    "ModelSource",
    "Phase",
    "Request",
    "TransformersSource",
]


class TransformersSource(msgspec.Struct, frozen=True, tag="transformers"):
    """A transformers model; exactly one of `folder` and `config`.

    Attributes:
        folder: Local folder with config.json and (optionally) safetensors weights.
        config: Inline configuration with `model_type`.
        architecture: Model class name; `None` derives it from the task (`AutoModelForCausalLM`, `AutoModel`).
    """

    folder: str | None = None
    config: dict[str, Any] | None = None
    architecture: str | None = None


class FactorySource(msgspec.Struct, frozen=True, tag="torch"):
    """A Python callable that returns an `nn.Module`.

    Attributes:
        factory: `package.module:callable`.
        search_path: Folder put on `sys.path` while it is imported.
    """

    factory: str
    search_path: str | None = None


class ExportedSource(msgspec.Struct, frozen=True, tag="pt2"):
    """A saved `torch.export` program."""

    path: str


ModelSource = TransformersSource | FactorySource | ExportedSource


class ModelInput(msgspec.Struct, frozen=True):
    """An input of a `forward` task.

    Attributes:
        name: Of the argument.
        shape: Integers, or names of the workload's grid symbols.
        dtype: Of its elements; empty for that of a saved program, until `settle_exported` fills it in.
    """

    name: str
    shape: tuple[int | str, ...]
    dtype: str


class Phase(msgspec.Struct, frozen=True):
    """One phase of the workload.

    Attributes:
        name: `prefill` and `decode` for causal-lm; `forward` otherwise.
        grid: Values of each symbol (`batch`, `sequence`, `context`, or those of `Request.inputs`); their product is
            the grid.
        weight: Relative share of the deployment's time budget.
    """

    name: str
    grid: dict[str, tuple[int, ...]]
    weight: float = 1.0


class Request(msgspec.Struct, frozen=True):
    """What to extract.

    Attributes:
        source: Where the model comes from.
        dtype: Of weights and activations: `float32`, `bfloat16`, `float16`; of a saved program what it has, and empty
            until `settle_exported` fills it in.
        task: `causal-lm`, `encoder` or `forward`.
        phases: In the order they are to be traced.
        inputs: For `forward` tasks whose inputs cannot be derived; empty otherwise.
        max_length: Cache slots per row (causal-lm).
        max_batch: Rows of the cache (causal-lm).
        rules: Numeric rules of every task.
    """

    source: ModelSource
    dtype: str
    task: Literal["causal-lm", "encoder", "forward"]
    phases: tuple[Phase, ...]
    inputs: tuple[ModelInput, ...] = ()
    max_length: int = 0
    max_batch: int = 0
    rules: NumericRules = NumericRules()
