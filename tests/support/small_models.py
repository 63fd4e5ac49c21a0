"""Small transformers configurations and requests for them, and modules for the generic front ends."""

from typing import Any

import torch

from tune_model.extract.request import ModelInput, Phase, Request, TransformersSource

SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 1000,
    "hidden_size": 128,
    "intermediate_size": 352,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}

DECODERS: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {},
    "qwen3": {"head_dim": 16},
    "mistral": {"sliding_window": 4},
    "gemma2": {"head_dim": 16, "sliding_window": 4},
    "gemma3_text": {"head_dim": 16, "sliding_window": 4},
    "phi3": {},
    "phi": {},
    "olmo2": {},
    "granite": {},
    "cohere": {},
    "mixtral": {"num_local_experts": 4},
    "qwen3_moe": {"head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
    "gpt2": {"n_positions": 64},
    "opt": {"ffn_dim": 96, "word_embed_proj_dim": 64, "max_position_embeddings": 64},
    "gpt_neox": {},
}

WHISPER: dict[str, Any] = {
    "model_type": "whisper",
    "encoder_layers": 1,
    "decoder_layers": 1,
    "max_source_positions": 20,
    "d_model": 64,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
}


def decoder(model_type: str, *, phases: tuple[str, ...] = ("prefill", "decode"), **fields: Any) -> Request:
    """Ask for a small decoder in float32."""
    grids = {
        "prefill": {"batch": (1,), "sequence": (16,)},
        "decode": {"batch": (1, 2), "context": (20,)},
    }
    config = {"model_type": model_type, **SIZES, **DECODERS.get(model_type, {}), **fields}
    return Request(
        TransformersSource(config=config),
        "float32",
        "causal-lm",
        tuple(Phase(name, grids[name]) for name in phases),
        max_length=32,
        max_batch=4,
    )


def forward(config: dict[str, Any], *, architecture: str | None = None, **grid: tuple[int, ...]) -> Request:
    """Ask for a transformers model's single forward pass."""
    task = "forward" if architecture else "encoder"
    source = TransformersSource(config=config, architecture=architecture)
    return Request(source, "float32", task, (Phase("forward", grid),))


def inputs(**shapes: tuple[int | str, ...]) -> tuple[ModelInput, ...]:
    """List float32 inputs."""
    return tuple(ModelInput(name, shape, "float32") for name, shape in shapes.items())


class Mixed(torch.nn.Module):
    """One of everything a generic module may hold: tied weights, buffers of both kinds, a bare tensor, dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.nn.Linear(8, 8)
        self.tied = torch.nn.Linear(8, 8)
        self.tied.weight = self.inner.weight
        self.norm = torch.nn.BatchNorm1d(8)
        self.dropout = torch.nn.Dropout(0.5)
        self.register_buffer("offset", torch.arange(8.0), persistent=False)
        self.table = torch.tensor([0.5, -2.0])

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        y = self.dropout(self.tied(self.inner(x).relu())) + self.offset
        y = self.norm(y) * self.table[1] + torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0])
        first, second = y.split([3, 5], dim=-1)
        values, indices = second.topk(2)
        return {"first": first, "best": values, "at": indices, "all": y.reshape(-1)}


def make_mixed() -> torch.nn.Module:
    torch.manual_seed(0)
    return Mixed()


class Gate(torch.nn.Module):
    """A layer whose activation is a plain function among its attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(8, 8)
        self.activation = torch.relu

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.activation(self.linear(x))


class Gated(torch.nn.Module):
    """One such layer."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Gate()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x)


def make_gated() -> torch.nn.Module:
    torch.manual_seed(0)
    return Gated()


class Rotated(torch.nn.Module):
    """Heads turned as the first Llama turns them: by a table of complex numbers, here a buffer that is saved."""

    def __init__(self) -> None:
        super().__init__()
        self.project = torch.nn.Linear(24, 24, bias=False)
        angles = torch.outer(torch.arange(16.0), torch.tensor([1.0, 0.3, 0.1, 0.01]))
        self.register_buffer("turns", torch.polar(torch.ones_like(angles), angles))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = self.project(x).float().unflatten(-1, (3, 4, 2))
        turned = torch.view_as_complex(heads) * self.turns[: x.shape[1], None]
        return torch.view_as_real(turned).flatten(2).type_as(x)


class Complex(torch.nn.Module):
    """Complex weights, conjugates and results."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(8, 8, dtype=torch.complex64))
        self.real = torch.nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        z = torch.complex(self.real(x), x) @ self.weight
        return {"z": z, "conjugate": z.conj(), "power": (z * z.conj()).real, "part": z.conj().imag}


def make_rotated() -> torch.nn.Module:
    torch.manual_seed(0)
    return Rotated()


def make_complex() -> torch.nn.Module:
    torch.manual_seed(0)
    return Complex()
