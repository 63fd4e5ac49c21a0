"""The models: public dimensions, random weights, the grids that a deployment would ask for."""

from collections.abc import Mapping
from typing import Any, Final, NamedTuple

__all__ = ["Model", "encoders", "llama", "tiny_llama"]

PREFILL: Final = (512, 2048, 8192)
SHORT, LONG = 1024, 8192
SPARE_SLOTS: Final = 64
"""Cache slots beyond the longest context, so that there is room for a token."""


class Model(NamedTuple):
    """A model and its workload.

    Attributes:
        name: Of its artifact.
        config: As a configuration file holds it.
    """

    name: str
    config: Mapping[str, Any]

    @property
    def task(self) -> str:
        """Its task."""
        return str(self.config["task"])


def llama(*, small: bool) -> Model:
    """Llama 3 8B; `small` is tiny and takes seconds on a CPU."""
    if small:
        return tiny_llama()
    fields = {
        "model_type": "llama",
        "vocab_size": 128256,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "max_position_embeddings": LONG + SPARE_SLOTS,
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
        "tie_word_embeddings": False,
        "bos_token_id": 128000,
        "eos_token_id": 128001,
    }
    workload = {
        "max_length": LONG + SPARE_SLOTS,
        "max_batch": 64,
        "decode": {"batch": [1, 8, 16, 64], "context": [SHORT, LONG], "weight": 4},
        "prefill": {"batch": [1], "sequence": list(PREFILL), "weight": 1},
    }
    return Model("llama-3-8b", _document("llama-3-8b", fields, "causal-lm", "bfloat16", workload))


def tiny_llama() -> Model:
    """A Llama that a CPU serves to many clients."""
    fields = {
        "model_type": "llama",
        "vocab_size": 1000,
        "hidden_size": 128,
        "intermediate_size": 352,
        "num_hidden_layers": 2,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    workload = {
        "max_length": 128,
        "max_batch": 16,
        "decode": {"batch": [1, 4, 16], "context": [32]},
        "prefill": {"batch": [1], "sequence": [8, 32]},
    }
    return Model("tiny-llama", _document("tiny-llama", fields, "causal-lm", "float32", workload))


def encoders(kind: str, *, small: bool) -> tuple[Model, ...]:
    """BERT base and MiniLM, on a GPU ViT B/16 too, over the grid of their kind of device."""
    if small:
        return (_bert("tiny-bert", 64, 96, 2, 4, "float32", {"batch": [1], "sequence": [16]}),)
    if kind == "cpu":
        grid = {"batch": [1, 8], "sequence": [16, 32, 128]}
        return _bert_base("float32", grid), _mini_lm("float32", grid)
    grid = {"batch": [1, 8, 64], "sequence": [32, 128, 512]}
    return _bert_base("bfloat16", grid), _mini_lm("bfloat16", grid), _vit()


def _bert_base(dtype: str, grid: Mapping[str, list[int]]) -> Model:
    return _bert("bert-base", 768, 3072, 12, 12, dtype, grid)


def _mini_lm(dtype: str, grid: Mapping[str, list[int]]) -> Model:
    return _bert("minilm-l6", 384, 1536, 6, 12, dtype, grid)


def _bert(  # noqa: PLR0913, PLR0917 (its dimensions)
    name: str, hidden: int, intermediate: int, layers: int, heads: int, dtype: str, grid: Mapping[str, list[int]]
) -> Model:
    fields = {
        "model_type": "bert",
        "vocab_size": 30522,
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "max_position_embeddings": 512,
        "type_vocab_size": 2,
        "layer_norm_eps": 1e-12,
        "hidden_act": "gelu",
    }
    return Model(name, _document(name, fields, "encoder", dtype, {"forward": dict(grid)}, "BertModel"))


def _vit() -> Model:
    fields = {
        "model_type": "vit",
        "hidden_size": 768,
        "intermediate_size": 3072,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "image_size": 224,
        "patch_size": 16,
        "num_channels": 3,
        "qkv_bias": True,
        "layer_norm_eps": 1e-12,
        "hidden_act": "gelu",
    }
    document = _document("vit-b16", fields, "forward", "bfloat16", {"forward": {"batch": [1, 32]}}, "ViTModel")
    document["model"]["inputs"] = [{"name": "pixel_values", "shape": ["batch", 3, 224, 224]}]
    return Model("vit-b16", document)


def _document(
    name: str,
    fields: Mapping[str, Any],
    task: str,
    dtype: str,
    workload: Mapping[str, Any],
    architecture: str | None = None,
) -> dict[str, Any]:
    model = {"source": "transformers", "config": dict(fields)}
    if architecture is not None:
        model["architecture"] = architecture
    return {"name": name, "model": model, "task": task, "dtype": dtype, "workload": dict(workload), "target": "auto"}
