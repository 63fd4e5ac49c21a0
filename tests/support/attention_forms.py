"""Attention forms as extract states them."""

from tune_model.runtime.program import Call, Form, Parameter, Ref, TensorType, ValueRange


def decode_form(
    *,
    batch: int = 3,
    heads: int = 8,
    kv_heads: int = 2,
    head_dim: int = 64,
    length: int = 200,
    context: tuple[int, int] = (0, 150),
    dtype: str = "float16",
    scale: float | None = 0.125,
    window: int | None = None,
    softcap: float | None = None,
    append: bool = True,
) -> Form:
    """A decode step's attention over a cache, with the append of the new token."""
    cache = TensorType(dtype, (batch, kv_heads, length, head_dim))
    new = TensorType(dtype, (batch, kv_heads, 1, head_dim))
    parameters = [
        Parameter("a0", cache, "cache"),
        Parameter("a1", cache, "cache"),
        Parameter("a2", new),
        Parameter("a3", new),
        Parameter("a4", TensorType("int64", (batch, 1)), values=ValueRange(*context)),
        Parameter("a5", TensorType(dtype, (batch, heads, 1, head_dim))),
    ]
    if not append:
        del parameters[2:4]
    attention = Call(
        "tune_model.cached_attention",
        (Ref("a5"), Ref("a0"), Ref("a1"), Ref("a4"), scale, window, softcap),
        (),
        ("t0",),
    )
    written = Call("tune_model.append_kv", tuple(Ref(f"a{i}") for i in range(5)), (), ())
    # The result is laid out as the next linear reads it: [batch, 1, heads * head_dim].
    out = TensorType(dtype, (batch, heads, 1, head_dim), (heads * head_dim, head_dim, heads * head_dim, 1))
    body = (written, attention) if append else (attention,)
    return Form("attention", (), tuple(parameters), body, (Parameter("t0", out),))
