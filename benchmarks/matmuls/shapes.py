"""Which matmuls are measured: weights of well-known models, merged as extract merges them, at decode and prefill sizes.

A linear layer of weight [n, k] over m rows is written `m x k x n`, as the tuner labels it.
"""

from collections.abc import Iterable
from typing import Final

import msgspec

__all__ = [
    "FEW",
    "LARGE",
    "MAX_AUTOTUNE_ROWS",
    "REGRET",
    "ROWS",
    "SMALL",
    "Matmul",
    "Suite",
    "llama_8b",
    "merge_owners",
    "suite_named",
]

ROWS: Final = (1, 2, 4, 8, 16, 32, 64, 128, 257, 512, 1025, 2048, 8192)
MAX_AUTOTUNE_ROWS: Final = (1, 8, 16, 64, 512, 2048)

# (model, part, n, k). Tensor parallel 8: query, key/value heads and the intermediate size are divided by 8.
_WEIGHTS: Final = (
    ("Llama-3-8B", "qkv", 6144, 4096),
    ("Llama-3-8B", "o", 4096, 4096),
    ("Llama-3-8B", "gate_up", 28672, 4096),
    ("Llama-3-8B", "down", 4096, 14336),
    ("Llama-3-8B", "head", 128256, 4096),
    ("Llama-3-70B TP8", "qkv", 1280, 8192),
    ("Llama-3-70B TP8", "o", 8192, 1024),
    ("Llama-3-70B TP8", "gate_up", 7168, 8192),
    ("Llama-3-70B TP8", "down", 8192, 3584),
    ("Llama-3-70B TP8", "head", 16032, 8192),
    ("Qwen3-8B", "qkv", 6144, 4096),
    ("Qwen3-8B", "o", 4096, 4096),
    ("Qwen3-8B", "gate_up", 24576, 4096),
    ("Qwen3-8B", "down", 4096, 12288),
    ("Qwen3-8B", "head", 151936, 4096),
    ("Mixtral-8x7B expert", "gate_up", 28672, 4096),
    ("Mixtral-8x7B expert", "down", 4096, 14336),
    ("BERT-base", "qkv", 2304, 768),
    ("BERT-base", "o", 768, 768),
    ("BERT-base", "up", 3072, 768),
    ("BERT-base", "down", 768, 3072),
    ("BERT-base", "head", 30522, 768),
    ("ViT-B/16", "qkv", 2304, 768),
    ("ViT-B/16", "o", 768, 768),
    ("ViT-B/16", "up", 3072, 768),
    ("ViT-B/16", "down", 768, 3072),
    ("ViT-B/16", "head", 1000, 768),
)


class Matmul(msgspec.Struct, frozen=True):
    """A linear layer at one number of rows.

    Attributes:
        m: Rows of the activation.
        n: Rows of the weight: columns of the result.
        k: Columns of both.
        owners: `model part`, every place it comes from.
    """

    m: int
    n: int
    k: int
    owners: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """The row's name in the result file."""
        return f"{self.m}x{self.k}x{self.n}"

    @property
    def weight_bytes(self) -> int:
        """Bytes of the bfloat16 weight."""
        return 2 * self.n * self.k

    @property
    def size_bytes(self) -> int:
        """Least traffic of one call: everything once."""
        return 2 * (self.m * self.k + self.n * self.k + self.m * self.n)

    @property
    def flops(self) -> int:
        """Floating-point operations of one call."""
        return 2 * self.m * self.n * self.k


class Suite(msgspec.Struct, frozen=True):
    """What one run of the benchmark covers.

    Attributes:
        rows: The table, most wanted first.
        max_autotune: Which of them meet `torch.compile` too.
        regret: Which are raced exhaustively.
        epilogue_rows: Rows of the activation in the table of epilogues.
        scale: Sizes of the layers with epilogues are divided by this.
    """

    rows: tuple[Matmul, ...]
    max_autotune: tuple[Matmul, ...]
    regret: tuple[Matmul, ...]
    epilogue_rows: tuple[int, ...]
    scale: int = 1


def merge_owners(weights: Iterable[tuple[str, str, int, int]]) -> dict[tuple[int, int], tuple[str, ...]]:
    """Return each distinct (n, k) with everyone who has it, in order of appearance."""
    found: dict[tuple[int, int], tuple[str, ...]] = {}
    for model, part, n, k in weights:
        found[n, k] = (*found.get((n, k), ()), f"{model} {part}")
    return found


def _rows() -> tuple[Matmul, ...]:
    """Order by how much depends on a row: what else is measured of it first, then by model, small sizes first."""
    weights = merge_owners(_WEIGHTS)
    every = [Matmul(m, n, k, owners) for (n, k), owners in weights.items() for m in ROWS]
    return tuple(sorted(every, key=lambda row: not _meets_max_autotune(row)))


def _meets_max_autotune(row: Matmul) -> bool:
    return row.m in MAX_AUTOTUNE_ROWS and any(owner.startswith("Llama-3-8B ") for owner in row.owners)


LARGE: Final = _rows()

# Every regime once: one row, few rows, a split that pays, tiles, ragged sizes; wide, narrow, long and short weights.
REGRET: Final = tuple(
    Matmul(m, n, k)
    for m, n, k in (
        (1, 6144, 4096),
        (1, 4096, 14336),
        (4, 4096, 4096),
        (8, 768, 3072),
        (16, 28672, 4096),
        (32, 8192, 1024),
        (64, 6144, 4096),
        (128, 4096, 14336),
        (257, 1280, 8192),
        (512, 4096, 4096),
        (1025, 3072, 768),
        (2048, 6144, 4096),
    )
)

FEW: Final = tuple(Matmul(m, n, k, ("small",)) for n, k in ((96, 64), (64, 128)) for m in (1, 16, 40, 130))
"""To try the benchmark itself in seconds."""

SMALL: Final = Suite(FEW, FEW[:2], FEW[:2], (1, 16), scale=64)


def suite_named(*, small: bool) -> Suite:
    """Return the whole suite, or the one that takes seconds on a CPU."""
    if small:
        return SMALL
    compared = tuple(row for row in LARGE if _meets_max_autotune(row))
    return Suite(LARGE, compared, REGRET, (1, 16, 512, 2048))


def llama_8b(part: str) -> tuple[int, int]:
    """Return (n, k) of one of Llama-3-8B's merged weights."""
    return next((n, k) for model, name, n, k in _WEIGHTS if (model, name) == ("Llama-3-8B", part))
