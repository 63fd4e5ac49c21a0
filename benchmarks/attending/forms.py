"""Attention of Llama-3-8B's layers as extract states it; tests compare with extract's own."""

from typing import Final

from tune_model.runtime.program import Call, Form, Parameter, Ref, TensorType, ValueRange

__all__ = ["GEMMA", "LLAMA", "Heads", "decode_form", "padded_form", "prefill_form"]

DTYPE: Final = "bfloat16"

Heads = tuple[int, int, int]
"""Query heads, key/value heads, head dim."""

LLAMA: Final[Heads] = (32, 8, 128)
GEMMA: Final[Heads] = (16, 8, 256)
"""Gemma-2-9B, whose scores are soft-capped and whose every other layer sees a window."""


def decode_form(batch: int, context: tuple[int, int], max_length: int, shape: Heads = LLAMA) -> Form:
    """Return a decode step's attention with its append; queries, keys and values are parts of the merged projection.

    Args:
        batch: Rows.
        context: Positions are drawn from this range, ends included.
        max_length: Of the cache.
        shape: Of the heads.
    """
    heads, kv_heads, head_dim = shape
    rotated, merged = (heads + kv_heads) * head_dim, (heads + 2 * kv_heads) * head_dim
    cache = TensorType(DTYPE, (batch, kv_heads, max_length, head_dim))
    parameters = (
        Parameter("a0", cache, "cache"),
        Parameter("a1", cache, "cache"),
        Parameter("a2", TensorType(DTYPE, (batch, kv_heads, 1, head_dim), (rotated, head_dim, head_dim, 1))),
        Parameter("a3", TensorType(DTYPE, (batch, kv_heads, 1, head_dim), (merged, head_dim, head_dim, 1))),
        Parameter("a4", TensorType("int64", (batch, 1)), values=ValueRange(*context)),
        Parameter("a5", TensorType(DTYPE, (batch, heads, 1, head_dim), (rotated, head_dim, head_dim, 1))),
    )
    body = (
        Call("tune_model.append_kv", tuple(Ref(f"a{i}") for i in range(5))),
        Call(
            "tune_model.cached_attention",
            (Ref("a5"), Ref("a0"), Ref("a1"), Ref("a4"), head_dim**-0.5, None, None),
            results=("t0",),
        ),
    )
    result = Parameter("t0", TensorType(DTYPE, (batch, heads, 1, head_dim)))
    return Form("attention", (), parameters, body, (result,))


def prefill_form(
    length: int, shape: Heads = LLAMA, *, window: int | None = None, softcap: float | None = None, cache: int = 0
) -> Form:
    """Return the attention of one prompt; with a `cache` of that length, its append too."""
    heads, kv_heads, head_dim = shape
    rotated, merged = (heads + kv_heads) * head_dim, (heads + 2 * kv_heads) * head_dim

    def part(count: int, row: int) -> TensorType:
        return TensorType(DTYPE, (1, count, length, head_dim), (length * row, head_dim, row, 1))

    kept = TensorType(DTYPE, (1, kv_heads, cache, head_dim))
    appended = (
        Parameter("a0", kept, "cache"),
        Parameter("a1", kept, "cache"),
        Parameter("a2", part(kv_heads, rotated)),
        Parameter("a3", part(kv_heads, merged)),
        Parameter("a4", TensorType("int64", (1, length)), values=ValueRange(0, length - 1)),
        Parameter("a5", part(heads, rotated)),
    )
    attend = Call(
        "tune_model.causal_attention",
        (Ref("a5"), Ref("a2"), Ref("a3"), head_dim**-0.5, window, softcap),
        results=("t0",),
    )
    out = TensorType(DTYPE, (1, heads, length, head_dim), (length * heads * head_dim, head_dim, heads * head_dim, 1))
    result = (Parameter("t0", out),)
    if cache:
        append = Call("tune_model.append_kv", tuple(Ref(f"a{i}") for i in range(5)))
        return Form("attention", (), appended, (append, attend), result)
    return Form("attention", (), (*appended[2:4], appended[5]), (attend,), result)


def padded_form(batch: int, length: int, heads: int, head_dim: int) -> Form:
    """Return an encoder's attention under a padding mask."""
    type_ = TensorType(DTYPE, (batch, heads, length, head_dim))
    mask = Parameter("a3", TensorType("bool", (batch, 1, 1, length)))
    parameters = (*(Parameter(f"a{i}", type_) for i in range(3)), mask)
    call = Call("aten.scaled_dot_product_attention.default", tuple(Ref(f"a{i}") for i in range(4)), results=("t0",))
    return Form("attention", (), parameters, (call,), (Parameter("t0", type_),))
