"""Attention forms as extract states them."""

from tune_model.runtime.program import Call, Form, Items, Parameter, Ref, TensorType, ValueRange


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
    sinks: bool = False,
    row: int | None = None,
) -> Form:
    """A decode step's attention over a cache, with the append of the new token; a slot takes `row` elements."""
    row = row or head_dim
    strides = (kv_heads * length * row, length * row, row, 1)
    cache = TensorType(dtype, (batch, kv_heads, length, head_dim), None if row == head_dim else strides)
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
        (Ref("a5"), Ref("a0"), Ref("a1"), Ref("a4"), scale, window, softcap, *_sinks(parameters, heads, sinks)),
        (),
        ("t0",),
    )
    written = Call("tune_model.append_kv", tuple(Ref(f"a{i}") for i in range(5)), (), ())
    # The result is laid out as the next linear reads it: [batch, 1, heads * head_dim].
    out = TensorType(dtype, (batch, heads, 1, head_dim), (heads * head_dim, head_dim, heads * head_dim, 1))
    body = (written, attention) if append else (attention,)
    return Form("attention", (), tuple(parameters), body, (Parameter("t0", out),))


def causal_form(
    *,
    batch: int = 1,
    heads: int = 8,
    kv_heads: int = 2,
    head_dim: int = 64,
    length: int = 100,
    max_length: int = 128,
    dtype: str = "bfloat16",
    window: int | None = None,
    softcap: float | None = None,
    append: bool = True,
    sinks: bool = False,
) -> Form:
    """A fresh prefill: the prompt's keys and values go to the cache and are attended to directly."""
    cache = TensorType(dtype, (batch, kv_heads, max_length, head_dim))
    new = TensorType(dtype, (batch, kv_heads, length, head_dim))
    parameters = [
        Parameter("a0", cache, "cache"),
        Parameter("a1", cache, "cache"),
        Parameter("a2", new),
        Parameter("a3", new),
        Parameter("a4", TensorType("int64", (batch, length)), values=ValueRange(0, length - 1)),
        Parameter("a5", TensorType(dtype, (batch, heads, length, head_dim))),
    ]
    body = (
        Call("tune_model.append_kv", tuple(Ref(f"a{i}") for i in range(5)), (), ()),
        Call(
            "tune_model.causal_attention",
            (Ref("a5"), Ref("a2"), Ref("a3"), head_dim**-0.5, window, softcap, *_sinks(parameters, heads, sinks)),
            (),
            ("t0",),
        ),
    )
    out = TensorType(dtype, (batch, heads, length, head_dim))
    if not append:
        parameters, body = [*parameters[2:4], *parameters[5:]], body[1:]
    return Form("attention", (), tuple(parameters), body, (Parameter("t0", out),))


def _sinks(parameters: list[Parameter], heads: int, wanted: bool) -> tuple[Ref, ...]:
    """Add one more score for each head to a form, where it is wanted."""
    if not wanted:
        return ()
    parameters.append(Parameter("a6", TensorType(parameters[0].type.dtype, (heads,)), "weight"))
    return (Ref("a6"),)


def chunk_form(
    *,
    batch: int = 2,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 32,
    new: int = 5,
    length: int = 96,
    dtype: str = "float16",
    window: int | None = None,
) -> Form:
    """Several new tokens per row over the cache: a later part of a prompt."""
    cache = TensorType(dtype, (batch, kv_heads, length, head_dim))
    fresh = TensorType(dtype, (batch, kv_heads, new, head_dim))
    queries = TensorType(dtype, (batch, heads, new, head_dim))
    parameters = (
        Parameter("a0", cache, "cache"),
        Parameter("a1", cache, "cache"),
        Parameter("a2", fresh),
        Parameter("a3", fresh),
        Parameter("a4", TensorType("int64", (batch, new)), values=ValueRange(0, length - 1)),
        Parameter("a5", queries),
    )
    body = (
        Call("tune_model.append_kv", tuple(Ref(f"a{i}") for i in range(5)), (), ()),
        Call(
            "tune_model.cached_attention", (Ref("a5"), Ref("a0"), Ref("a1"), Ref("a4"), 0.2, window, None), (), ("t0",)
        ),
    )
    return Form("attention", (), parameters, body, (Parameter("t0", queries),))


def sdpa_form(
    *,
    batch: int = 2,
    heads: int = 4,
    kv_heads: int | None = None,
    head_dim: int = 64,
    length: int = 33,
    keys: int | None = None,
    dtype: str = "float16",
    masked: bool = False,
    mask: tuple[str, tuple[int, ...]] | None = None,
    causal: bool = False,
) -> Form:
    """An encoder's attention, with a boolean mask, one of a given type and shape, or none."""
    keys, kv_heads = keys or length, kv_heads or heads
    type_ = TensorType(dtype, (batch, heads, length, head_dim))
    other = TensorType(dtype, (batch, kv_heads, keys, head_dim))
    parameters = [Parameter("a0", type_), Parameter("a1", other), Parameter("a2", other)]
    arguments: list[Ref] = [Ref("a0"), Ref("a1"), Ref("a2")]
    if masked:
        mask = ("bool", (batch, 1, length, keys))
    if mask is not None:
        parameters.append(Parameter("a3", TensorType(*mask)))
        arguments.append(Ref("a3"))
    keywords = (("enable_gqa", True),) if kv_heads != heads else ()
    if causal:
        keywords += (("is_causal", True),)
    call = Call("aten.scaled_dot_product_attention.default", tuple(arguments), tuple(sorted(keywords)), ("t0",))
    return Form("attention", (), tuple(parameters), (call,), (Parameter("t0", type_),))


def turned_form(
    *,
    batch: int = 3,
    heads: int = 8,
    kv_heads: int = 2,
    head_dim: int = 64,
    length: int = 200,
    context: tuple[int, int] = (0, 150),
    dtype: str = "float16",
    normal: bool = False,
) -> Form:
    """A decode step that rotates its queries and keys, and with `normal` norms each head before, as extract states it.

    Queries, keys and values are parts of one merged projection; angles are shared by a row's heads.
    """
    row = (heads + 2 * kv_heads) * head_dim

    def part(count: int) -> TensorType:
        return TensorType(dtype, (batch, count, 1, head_dim), (row, head_dim, row, 1))

    cache = TensorType(dtype, (batch, kv_heads, length, head_dim))
    angle = TensorType(dtype, (batch, 1, 1, head_dim))
    weight = TensorType(dtype, (head_dim,))
    parameters = [
        Parameter("a0", cache, "cache"),
        Parameter("a1", cache, "cache"),
        Parameter("a2", part(heads) if normal else part(heads + kv_heads)),
        Parameter("a3", part(kv_heads)),
        Parameter("a4", TensorType("int64", (batch, 1)), values=ValueRange(*context)),
        Parameter("a5", angle),
        Parameter("a6", angle),
    ]
    body: list[Call] = []

    def call(op: str, *args: object) -> Ref:
        body.append(Call(f"aten.{op}", args, (), (f"t{len(body)}",)))  # type: ignore[arg-type]
        return Ref(f"t{len(body) - 1}")

    def turned(x: Ref) -> Ref:
        half = head_dim // 2
        upper, lower = call("slice.Tensor", x, 3, half, head_dim), call("slice.Tensor", x, 3, 0, half)
        swapped = call("cat.default", Items((call("neg.default", upper), lower)), 3)
        return call("add.Tensor", call("mul.Tensor", x, Ref("a5")), call("mul.Tensor", swapped, Ref("a6")))

    if normal:
        parameters += [Parameter("a7", part(kv_heads)), Parameter("a8", weight, "weight"), Parameter("a9", weight)]
        q, k = (
            turned(call("rms_norm.default", Ref(x), Items((head_dim,)), Ref(w), 1e-6))
            for x, w in (("a2", "a8"), ("a7", "a9"))
        )
    else:
        whole = turned(Ref("a2"))
        k = call("slice.Tensor", whole, 1, heads, heads + kv_heads)
    body.append(Call("tune_model.append_kv", (Ref("a0"), Ref("a1"), k, Ref("a3"), Ref("a4")), (), ()))
    if not normal:
        body.append(Call("aten.slice.Tensor", (whole, 1, 0, heads), (), ("q",)))
        q = Ref("q")
    attention = (q, Ref("a0"), Ref("a1"), Ref("a4"), head_dim**-0.5, None, None)
    body.append(Call("tune_model.cached_attention", attention, (), ("out",)))
    out = TensorType(dtype, (batch, heads, 1, head_dim), (heads * head_dim, head_dim, heads * head_dim, 1))
    return Form("attention", (), tuple(parameters), tuple(body), (Parameter("out", out),))
