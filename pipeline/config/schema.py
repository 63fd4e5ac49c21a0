"""The fields of a configuration, their types and what they mean. `tune-model schema` prints this file as JSON Schema.

What one field alone can get wrong is said here (`expected` is the wording of the error); what fields can get wrong
together is in `rules`.
"""

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

__all__ = [
    "Config",
    "DecodePhase",
    "ExportedModel",
    "ForwardPhase",
    "InputSpec",
    "ModelConfig",
    "OutputConfig",
    "PrefillPhase",
    "SearchConfig",
    "TorchModel",
    "TransformersModel",
    "WorkloadConfig",
    "json_schema",
]

# Python's `$` also matches before a final newline; `(?!\n)` closes that, and is valid in JSON Schema too.
DURATION = r"^[0-9]+(\.[0-9]+)?(s|m|h)(?!\n)$"
TARGET = r"^(auto|cpu|cuda|cuda:sm_[1-9][0-9]{1,2})(?!\n)$"
FACTORY = r"^[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*(?!\n)$"
SYMBOL = r"^[a-z_][a-z0-9_]*(?!\n)$"
NAME = r"^[A-Za-z0-9][A-Za-z0-9._-]*(?!\n)$"

Size = Annotated[int, Meta(ge=1, le=2**31 - 1, extra={"expected": "a positive integer"})]
Sizes = Annotated[tuple[Size, ...], Meta(min_length=1, extra={"expected": "a non-empty list of positive integers"})]
Weight = Annotated[float, Meta(gt=0, extra={"expected": "a positive number"})]
Text = Annotated[str, Meta(min_length=1, extra={"expected": "non-empty text"})]
Symbol = Annotated[str, Meta(pattern=SYMBOL, extra={"expected": "a name such as batch or sequence"})]
Dtype = Literal["float32", "bfloat16", "float16"]
InputDtype = Literal["float32", "bfloat16", "float16", "complex64", "int64", "int32", "bool"]


class Strict(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What every part of a configuration is: closed to fields it does not know, and (each says so) immutable."""


class InputSpec(Strict, frozen=True, kw_only=True):
    """One input tensor of a model's `forward`."""

    name: Annotated[Text, Meta(description="Name of the argument.")]
    shape: Annotated[
        tuple[Size | Symbol, ...],
        Meta(description="Sizes: an integer, or the name of a size that the workload's grid gives values to."),
    ]
    dtype: Annotated[
        InputDtype | None,
        Meta(description="Element type; the configuration's dtype by default, of a saved program what it takes."),
    ] = None


Inputs = Annotated[
    tuple[InputSpec, ...],
    Meta(description="The inputs of a `forward` task. Other tasks know theirs (input_ids, attention_mask, cache)."),
]


class TransformersModel(Strict, frozen=True, kw_only=True, tag_field="source", tag="transformers"):
    """A transformers model. Give exactly one of `path`, `hub` and `config`."""

    path: Annotated[
        Text | None,
        Meta(
            description="Folder with config.json and safetensors weights, relative to the configuration file; or "
            "`package:NAME/FOLDER`, a folder inside an installed Python package."
        ),
    ] = None
    hub: Annotated[Text | None, Meta(description="Hub id (`owner/name`), found in the local cache only.")] = None
    revision: Annotated[Text | None, Meta(description="Revision of `hub`; the main branch by default.")] = None
    config: Annotated[
        dict[str, Any] | None,
        Meta(description="Inline configuration: `model_type` and that model's fields. Tunes without any weights."),
    ] = None
    architecture: Annotated[
        Text | None, Meta(description="Model class, such as LlamaForCausalLM; by default the task's usual one.")
    ] = None
    inputs: Inputs = ()


class TorchModel(Strict, frozen=True, kw_only=True, tag_field="source", tag="torch"):
    """Any `torch.nn.Module` that a Python function returns."""

    factory: Annotated[
        str,
        Meta(
            pattern=FACTORY,
            description="`package.module:callable`; called without arguments, returns an nn.Module. Runs your code.",
            extra={"expected": "package.module:callable"},
        ),
    ]
    path: Annotated[
        Text | None,
        Meta(description="Folder to import from, relative to the configuration file, if it is not installed."),
    ] = None
    inputs: Inputs = ()


class ExportedModel(Strict, frozen=True, kw_only=True, tag_field="source", tag="pt2"):
    """A program saved with `torch.export.save`."""

    path: Annotated[Text, Meta(description="The .pt2 file, relative to the configuration file.")]
    inputs: Inputs = ()


ModelConfig = TransformersModel | TorchModel | ExportedModel


class PrefillPhase(Strict, frozen=True, kw_only=True):
    """Prompts are read: `sequence` new tokens per row, from an empty cache."""

    batch: Annotated[Sizes, Meta(description="Rows per call.")]
    sequence: Annotated[Sizes, Meta(description="Prompt lengths.")]
    weight: Annotated[Weight, Meta(description="Share of the deployment's time, relative to other phases.")] = 1.0


class DecodePhase(Strict, frozen=True, kw_only=True):
    """One token per row is generated, with `context` cache slots already filled."""

    batch: Annotated[Sizes, Meta(description="Rows per step.")]
    context: Annotated[Sizes, Meta(description="Filled cache lengths.")]
    weight: Annotated[Weight, Meta(description="Share of the deployment's time, relative to other phases.")] = 1.0


class ForwardPhase(Strict, frozen=True, kw_only=True):
    """One call of an encoder or of any other model."""

    batch: Annotated[Sizes | None, Meta(description="Values of the size named batch.")] = None
    sequence: Annotated[Sizes | None, Meta(description="Values of the size named sequence.")] = None
    grid: Annotated[
        dict[Symbol, Sizes], Meta(description="Values of other sizes, by the names that the model's inputs use.")
    ] = {}
    weight: Annotated[Weight, Meta(description="Share of the deployment's time, relative to other phases.")] = 1.0


class WorkloadConfig(Strict, frozen=True, kw_only=True):
    """What production runs. Every combination of a phase's values is tuned."""

    prefill: Annotated[PrefillPhase | None, Meta(description="For causal-lm.")] = None
    decode: Annotated[DecodePhase | None, Meta(description="For causal-lm.")] = None
    forward: Annotated[ForwardPhase | None, Meta(description="For encoder and forward tasks.")] = None
    max_length: Annotated[
        Size | None, Meta(description="Cache slots per row, prompt and generated tokens together (causal-lm).")
    ] = None
    max_batch: Annotated[
        Size | None, Meta(description="Rows of the cache (causal-lm); the largest batch by default.")
    ] = None
    operators: Annotated[
        bool,
        Meta(description="Tune operators inside fused steps by themselves too, for code that calls them one by one."),
    ] = False


class SearchConfig(Strict, frozen=True, kw_only=True):
    """How much is searched, and which numeric freedom candidates have."""

    effort: Annotated[
        Literal["quick", "balanced", "thorough"], Meta(description="How much of the space is searched.")
    ] = "balanced"
    budget: Annotated[
        Annotated[str, Meta(pattern=DURATION, extra={"expected": "a duration such as 90s, 10m or 2h"})] | None,
        Meta(description="Longest time to tune: 90s, 10m, 2h; null for no limit."),
    ] = None
    allow_nondeterministic: Annotated[
        bool, Meta(description="Allow kernels whose last bits differ from run to run (atomic split-K).")
    ] = False
    allow_tf32: Annotated[bool, Meta(description="Allow float32 matmuls to round their operands to tf32.")] = False
    batch_invariant: Annotated[
        bool,
        Meta(description="A row of a matmul has the same bits whatever the number of rows (CUDA; costs speed)."),
    ] = False
    seed: Annotated[
        int,
        Meta(
            ge=0,
            le=2**63 - 1,
            description="Of test data and orders.",
            extra={"expected": "an integer from 0 to 2**63 - 1"},
        ),
    ] = 0


class OutputConfig(Strict, frozen=True, kw_only=True):
    """Where the artifact goes and what it carries."""

    path: Annotated[
        Text | None, Meta(description="Relative to the current folder; NAME.tuned by default. `-o` overrides it.")
    ] = None
    weights: Annotated[
        Literal["external", "embed"], Meta(description="Leave the model's weights outside, or put them in.")
    ] = "external"


class Config(Strict, frozen=True, kw_only=True):
    """One model, one workload, one target: all that `tune-model CONFIG.yaml` needs to know."""

    name: Annotated[
        str,
        Meta(
            pattern=NAME,
            description="Of the model, in reports and file names.",
            extra={"expected": "letters, digits, dots, dashes and underscores"},
        ),
    ]
    model: Annotated[ModelConfig, Meta(description="Where the model comes from.")]
    task: Annotated[
        Literal["causal-lm", "encoder", "forward"],
        Meta(
            description="causal-lm: prefill and decode with a cache. encoder: input_ids and attention_mask. forward: "
            "any inputs, as the model lists them."
        ),
    ]
    workload: Annotated[WorkloadConfig, Meta(description="The shapes that production runs.")]
    dtype: Annotated[
        Dtype | None,
        Meta(
            description="Of weights and activations; bfloat16 by default, and of a saved program what it was saved in."
        ),
    ] = None
    target: Annotated[
        str,
        Meta(
            pattern=TARGET,
            description="auto (a GPU if there is one), cpu, cuda (this machine's GPU), or an architecture: cuda:sm_90",
            extra={"expected": "auto, cpu, cuda, or an architecture such as cuda:sm_90"},
        ),
    ] = "auto"
    search: SearchConfig = SearchConfig()
    output: OutputConfig = OutputConfig()


def json_schema() -> dict[str, Any]:
    """Return the JSON Schema (2020-12) of a configuration file."""
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **msgspec.json.schema(Config)}
