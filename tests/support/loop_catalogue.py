"""Forms that a lowering and its emitters must get right, with inputs that hold what floats can hold."""

import math
from collections.abc import Iterator

import torch
from form_builder import FormBuilder, random_inputs

from tune_model.runtime.program import Form, ValueRange

SPECIAL = torch.tensor([math.nan, math.inf, -math.inf, 0.0, -0.0, 30.0, -90.0, -20.0, 1e-40, 1e38])

UNARY = (
    "neg",
    "abs",
    "sign",
    "floor",
    "ceil",
    "trunc",
    "round",
    "reciprocal",
    "sqrt",
    "rsqrt",
    "exp",
    "exp2",
    "expm1",
    "log",
    "log2",
    "log10",
    "log1p",
    "sin",
    "cos",
    "tan",
    "atan",
    "sinh",
    "cosh",
    "tanh",
    "erf",
    "sigmoid",
    "relu",
    "silu",
    "hardsigmoid",
    "hardswish",
    "softplus",
    "mish",
    "leaky_relu",
    "elu",
    "isnan",
    "isinf",
    "logical_not",
    "log_sigmoid",
    "square",
)

BINARY = (
    "add.Tensor",
    "sub.Tensor",
    "mul.Tensor",
    "div.Tensor",
    "maximum.default",
    "minimum.default",
    "fmod.Tensor",
    "remainder.Tensor",
    "floor_divide.default",
    "atan2.default",
    "eq.Tensor",
    "ne.Tensor",
    "lt.Tensor",
    "le.Tensor",
    "gt.Tensor",
    "ge.Tensor",
    "logical_and.default",
    "logical_or.default",
    "logical_xor.default",
)


def unary(dtype: str) -> Form:
    b = FormBuilder()
    x = b.input((3, 41), dtype)
    ops = UNARY if dtype == "float32" else UNARY[:32:3] if dtype == "float64" else UNARY[1::4]
    return b.form(*(b.call(f"{op}.default", x) for op in ops))


def gelu(dtype: str) -> Form:
    b = FormBuilder()
    x = b.input((3, 41), dtype)
    return b.form(b.call("gelu.default", x), b.call("gelu.default", x, approximate="tanh"))


def powers() -> Form:
    b = FormBuilder()
    x = b.call("abs.default", b.input((7, 13)))
    y = b.input((13,))
    exponents = (0, 1, 2, 3, -1, -2, 0.5, -0.5, 2.5)
    return b.form(*(b.call("pow.Tensor_Scalar", x, e) for e in exponents), b.call("pow.Tensor_Tensor", x, y))


def binary(first: str, second: str) -> Form:
    b = FormBuilder()
    x, y = b.input((4, 1, 19), first), b.input((5, 19), second, values=ValueRange(1, 6) if "int" in second else None)
    skipped = ("sub", "fmod", "remainder", "floor_divide") if "bool" in (first, second) else ()
    return b.form(*(b.call(op, x, y) for op in BINARY if not op.startswith(skipped or "-")))


def integers() -> Form:
    b = FormBuilder()
    x, y = b.input((43,), "int64", values=ValueRange(-20, 20)), b.input((43,), "int64", values=ValueRange(1, 7))
    z = b.input((43,), "int8", values=ValueRange(-100, 100))
    outs = [b.call("div.Tensor_mode", x, y, rounding_mode=m) for m in ("floor", "trunc")]
    outs += [b.call(f"bitwise_{n}.Tensor", x, y) for n in ("and", "or", "xor")]
    outs += [b.call("remainder.Scalar", x, -3), b.call("bitwise_not.default", x), b.call("pow.Tensor_Scalar", x, 3)]
    outs += [b.call("add.Tensor", z, z), b.call("mul.Tensor", z, z), b.call("add.Tensor", z, y)]
    return b.form(*outs, b.call("abs.default", x), b.call("sign.default", x), b.call("maximum.default", x, y))


def masks() -> Form:
    b = FormBuilder()
    x, y, m = b.input((4, 6, 19)), b.input((19,)), b.input((4, 1, 19), "bool")
    masked = b.call("masked_fill.Scalar", b.call("tril.default", x), m, -math.inf)
    clamped = b.call("clamp.default", masked, -1.0, 0.5)
    out = b.call("where.self", m, clamped, b.call("addcmul.default", x, y, x, value=0.5))
    return b.form(b.call("add.Tensor", out, b.call("arange.start", 2, 21)))


def casts() -> Form:
    b = FormBuilder()
    x, i, f = b.input((4, 21), "bfloat16"), b.input((4, 21), "int64"), b.input((4, 21), "bool")
    kinds = (torch.float32, torch.float16, torch.float64, torch.int32, torch.int64, torch.bool, torch.bfloat16)
    outs = [b.call("_to_copy.default", v, dtype=d) for v in (x, i, f) for d in kinds]
    return b.form(*outs)


def rope(dtype: str = "float32", shape: tuple[int, ...] = (2, 5, 4, 24)) -> Form:
    batch, length, heads, width = shape
    b = FormBuilder()
    x = b.input((batch, length, heads * width), dtype)
    cos, sin = (b.call("unsqueeze.default", b.input((batch, length, width), dtype), 1) for _ in range(2))
    q = b.call("transpose.int", b.call("view.default", x, [batch, length, heads, width]), 1, 2)
    first = b.call("slice.Tensor", q, 3, 0, width // 2)
    second = b.call("slice.Tensor", q, 3, width // 2, 2**63 - 1)
    turned = b.call("cat.default", [b.call("neg.default", second), first], -1)
    return b.form(b.call("add.Tensor", b.call("mul.Tensor", q, cos), b.call("mul.Tensor", turned, sin)))


def moved() -> Form:
    b = FormBuilder()
    x = b.input((4, 6, 10))
    parts = b.call("split_with_sizes.default", x, [2, 5, 3], 2, results=3)
    padded = b.call("constant_pad_nd.default", parts[1], [1, 2, -1, 0], 0.5)
    return b.form(b.call("permute.default", b.call("flip.default", padded, [2]), [2, 0, 1]))


def repeated() -> Form:
    b = FormBuilder()
    x = b.input((4, 6, 10))
    pieces = [b.call("select.int", x, 1, k) for k in (0, -1)]
    both = b.call("reshape.default", b.call("stack.default", pieces, 1), [8, 10])
    return b.form(b.call("repeat_interleave.self_int", b.call("repeat.default", both, [1, 2]), 3, 0))


def layer_norm(dtype: str, rows: int = 6, columns: int = 45) -> Form:
    b = FormBuilder("reduction")
    x, y = b.input((rows, columns), dtype), b.input((rows, columns), dtype)
    w, c = b.input((columns,), dtype, role="weight"), b.input((columns,), dtype, role="weight")
    s = b.call("add.Tensor", x, y)
    return b.form(s, b.call("layer_norm.default", s, [columns], w, c, 1e-5))


def softmax(dtype: str, columns: int = 77) -> Form:
    b = FormBuilder("reduction")
    scores, mask = b.input((2, 3, 5, columns), dtype), b.input((2, 1, 5, columns), dtype)
    s = b.call("add.Tensor", b.call("mul.Tensor", scores, 0.125), mask)
    return b.form(b.call("_softmax.default", s, -1, False), b.call("_log_softmax.default", s, -1, False))


def rms_norm(dtype: str) -> Form:
    b = FormBuilder("reduction")
    x, w = b.input((4, 40), dtype), b.input((40,), dtype, role="weight")
    wide = b.call("_to_copy.default", x, dtype=torch.float32)
    mean = b.call("mean.dim", b.call("pow.Tensor_Scalar", wide, 2), [-1], True)
    scale = b.call("rsqrt.default", b.call("add.Tensor", mean, 1e-6))
    normed = b.call("_to_copy.default", b.call("mul.Tensor", wide, scale), dtype=getattr(torch, dtype))
    return b.form(b.call("mul.Tensor", w, normed))


def statistics(dims: tuple[int, ...]) -> Form:
    b = FormBuilder("reduction")
    x, m = b.input((4, 5, 37)), b.input((4, 5, 37), "bool")
    listed = list(dims)
    outs = [b.call(f"{op}.default", x, listed) for op in ("amax", "amin", "logsumexp")]
    outs += [b.call("sum.dim_IntList", x, listed), b.call("mean.dim", x, listed, True)]
    outs += [b.call("var.correction", x, listed, correction=1), b.call("any.dims", m, listed)]
    outs += [b.call("all.dims", m, listed), b.call("linalg_vector_norm.default", x, 3.0, listed)]
    outs += [b.call("sum.dim_IntList", m, listed)]
    return b.form(*outs)


def positions() -> Form:
    b = FormBuilder("reduction")
    x = b.input((6, 100))
    values, indices = b.call("max.dim", x, 1, results=2)
    products = b.call("prod.dim_int", x, 1)
    return b.form(values, indices, b.call("argmin.default", x, 1), products)


def long_rows() -> Form:
    b = FormBuilder("reduction")
    x = b.input((2, 20011))
    return b.form(b.call("sum.dim_IntList", x, [1]), b.call("argmax.default", x, 1), b.call("mean.dim", x, [1]))


def embedding_norm() -> Form:
    b = FormBuilder("reduction")
    ids = b.input((4, 3), "int64", values=ValueRange(0, 9))
    table, position, w, c = b.input((10, 24)), b.input((3, 24)), b.input((24,)), b.input((24,))
    s = b.call("add.Tensor", b.call("embedding.default", table, ids), position)
    return b.form(b.call("layer_norm.default", s, [24], w, c, 1e-12))


def head_norm_rope() -> Form:
    """The query norm of Qwen3, then RoPE: columns of the norm are the last part of the result's columns."""
    b = FormBuilder("reduction")
    x, w, cos = b.input((5, 72)), b.input((24,)), b.input((5, 1, 24))
    normed = b.call("rms_norm.default", b.call("view.default", x, [5, 3, 24]), [24], w, 1e-6)
    halves = [b.call("slice.Tensor", normed, 2, 12, 24), b.call("slice.Tensor", normed, 2, 0, 12)]
    turned = b.call("cat.default", [b.call("neg.default", halves[0]), halves[1]], 2)
    out = b.call("add.Tensor", b.call("mul.Tensor", normed, cos), turned)
    return b.form(b.call("view.default", out, [5, 72]))


def group_norm() -> Form:
    b = FormBuilder("reduction")
    x, w, c = b.input((2, 6, 5)), b.input((6,)), b.input((6,))
    return b.form(b.call("silu.default", b.call("group_norm.default", x, 3, w, c)))


def channel_norm() -> Form:
    """Columns that are not the last dim, with two inner axes that do not merge."""
    b = FormBuilder("reduction")
    x = b.input((3, 4, 5, 6))
    return b.form(b.call("var.correction", x, [1, 3], correction=0))


def row_values_spread() -> Form:
    b = FormBuilder("reduction")
    x = b.input((3, 17))
    total = b.call("sum.dim_IntList", x, [1], True)
    return b.form(b.call("clone.default", b.call("expand.default", total, [3, 17])), b.call("sub.Tensor", x, total))


def empty_columns() -> Form:
    b = FormBuilder("reduction")
    x = b.input((3, 0))
    return b.form(b.call("sum.dim_IntList", x, [1]), b.call("mean.dim", x, [1]))


def shaped(rows: int, columns: int) -> Form:
    b = FormBuilder("reduction")
    return b.form(b.call("_softmax.default", b.input((rows, columns)), 1, False))


def large_pointwise() -> Form:
    b = FormBuilder()
    x, y = b.input((300, 257)), b.input((300, 257))
    return b.form(b.call("gelu.default", b.call("add.Tensor", x, y)))


FORMS = {
    "unary float32": lambda: unary("float32"),
    "unary bfloat16": lambda: unary("bfloat16"),
    "unary float16": lambda: unary("float16"),
    "unary float64": lambda: unary("float64"),
    "gelu float32": lambda: gelu("float32"),
    "gelu bfloat16": lambda: gelu("bfloat16"),
    "powers": powers,
    "binary float32": lambda: binary("float32", "float32"),
    "binary bfloat16 float32": lambda: binary("bfloat16", "float32"),
    "binary int64 float32": lambda: binary("int64", "float32"),
    "binary bool int32": lambda: binary("bool", "int32"),
    "binary int32 int64": lambda: binary("int32", "int64"),
    "binary float64 float32": lambda: binary("float64", "float32"),
    "integers": integers,
    "masks": masks,
    "casts": casts,
    "rope float32": rope,
    "rope bfloat16": lambda: rope("bfloat16"),
    "moved": moved,
    "repeated": repeated,
    "layer_norm float32": lambda: layer_norm("float32"),
    "layer_norm bfloat16": lambda: layer_norm("bfloat16"),
    "layer_norm float16": lambda: layer_norm("float16"),
    "layer_norm float64": lambda: layer_norm("float64"),
    "softmax float32": lambda: softmax("float32"),
    "softmax bfloat16": lambda: softmax("bfloat16"),
    "rms_norm bfloat16": lambda: rms_norm("bfloat16"),
    "rms_norm float16": lambda: rms_norm("float16"),
    "statistics last": lambda: statistics((2,)),
    "statistics first": lambda: statistics((0,)),
    "statistics all": lambda: statistics((0, 1, 2)),
    "statistics ends": lambda: statistics((0, 2)),
    "positions": positions,
    "long rows": long_rows,
    "embedding norm": embedding_norm,
    "head norm and rope": head_norm_rope,
    "group norm": group_norm,
    "channel norm": channel_norm,
    "row values spread": row_values_spread,
    "empty columns": empty_columns,
    "no rows": lambda: shaped(0, 5),
    "one element": lambda: shaped(1, 1),
    "one column": lambda: shaped(5, 1),
    "one row": lambda: shaped(1, 9),
    "large pointwise": large_pointwise,
}

ROUGH = {"bfloat16": 1.6e-2, "float16": 2e-3, "float64": 1e-12, "float32": 3e-6}


def special_values(ops: list[str]) -> torch.Tensor:
    """Return what floats can hold, without what ATen's own vector code gets wrong."""
    # fmod: NaN for quotients over 2^24, so no huge or tiny operands.
    special = SPECIAL[:-2] if any("fmod" in op for op in ops) else SPECIAL
    if any("gelu" in op for op in ops) and bool(torch.nn.functional.gelu(torch.full((64,), math.inf)).isnan().any()):
        # On some processors the gelu of an infinity, and of what becomes one when it is doubled.
        special = special[special.isnan() | (special.abs() < 1e38)]
    return special


def special_inputs(form: Form, seed: int = 0) -> Iterator[list[torch.Tensor]]:
    """Yield ordinary inputs, then inputs with NaN, infinities, zeros of both signs, denormals and large values."""
    yield random_inputs(form, seed=seed)
    inputs = random_inputs(form, seed=seed + 1)
    special = special_values([c.op for c in form.body])
    for tensor in inputs:
        if tensor.dtype.is_floating_point and tensor.is_contiguous() and tensor.numel() >= 3 * len(special):
            flat = tensor.view(-1)
            flat[: len(special)] = special.to(tensor.dtype)
            flat[-len(special) :] = special.to(tensor.dtype)
    yield inputs


def tolerance(name: str, dtype: torch.dtype) -> float:
    """Return the relative tolerance for a result; float32 and float64 results of narrower inputs keep their own."""
    known = ROUGH.get(str(dtype)[6:], 0.0)
    half = next((ROUGH[d] for d in ("bfloat16", "float16") if d in name), 0.0)
    return max(known, half) if dtype.is_floating_point else 0.0
