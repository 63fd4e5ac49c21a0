"""Matmul forms as extract states them, at one grid point or with a free number of rows."""

import torch
from form_builder import FormBuilder, run_body

from tune_model.runtime.program import Form, Parameter, Ref, TensorType


def _form(b: FormBuilder, *results: Ref) -> Form:
    """Type the results without multiplying anything."""
    draft = Form(b.kind, (), tuple(b.parameters), tuple(b.calls), ())
    inputs = [torch.empty(p.type.shape, dtype=getattr(torch, p.type.dtype), device="meta") for p in b.parameters]
    made = run_body(draft, inputs)
    types = [TensorType(str(made[r.name].dtype)[6:], tuple(made[r.name].shape)) for r in results]
    return Form(b.kind, (), draft.parameters, draft.body, tuple(map(Parameter, (r.name for r in results), types)))


def linear(m: int, n: int, k: int, dtype: str = "bfloat16", *, tail: str = "") -> Form:
    """A linear layer of an [n, k] weight and what follows it: `bias`, `residual`, `gelu`, `swiglu` or nothing."""
    b = FormBuilder("matmul")
    x = b.input((m, k), dtype)
    w = b.input((n * 2 if tail == "swiglu" else n, k), dtype, role="weight")
    if tail == "bias":
        return _form(b, b.call("linear.default", x, w, b.input((n,), dtype, role="weight")))
    y = b.call("linear.default", x, w)
    match tail:
        case "residual":
            return _form(b, b.call("add.Tensor", b.input((m, n), dtype), y))
        case "gelu":
            bias = b.input((n,), dtype, role="weight")
            return _form(b, b.call("gelu.default", b.call("add.Tensor", y, bias)), y)
        case "swiglu":
            gate, up = b.call("slice.Tensor", y, 1, 0, n), b.call("slice.Tensor", y, 1, n, 2 * n)
            return _form(b, b.call("mul.Tensor", b.call("silu.default", gate), up))
        case _:
            return _form(b, y)


def product(m: int, n: int, k: int, dtype: str = "float32") -> Form:
    """A product with a [k, n] matrix and a bias."""
    b = FormBuilder("matmul")
    bias, x = b.input((n,), dtype), b.input((m, k), dtype)
    return _form(b, b.call("addmm.default", bias, x, b.input((k, n), dtype, role="weight")))


Strides = tuple[int, ...]


def matrices(m: int, n: int, k: int, a: Strides | None, b: Strides | None, dtype: str = "float32") -> Form:
    """A product of two matrices that are no weights, with the strides given."""
    builder = FormBuilder("matmul")
    return _form(builder, builder.call("mm.default", builder.input((m, k), dtype, a), builder.input((k, n), dtype, b)))


def batched(
    batch: int,
    m: int,
    n: int,
    k: int,
    dtype: str = "float32",
    *,
    tail: str = "",
    a: Strides | None = None,
    b: Strides | None = None,
) -> Form:
    """Products of [batch, m, k] and [batch, k, n], and what follows them."""
    builder = FormBuilder("matmul")
    y = builder.call("bmm.default", builder.input((batch, m, k), dtype, a), builder.input((batch, k, n), dtype, b))
    match tail:
        case "gelu":
            return _form(builder, builder.call("gelu.default", y))
        case "residual":
            return _form(builder, builder.call("add.Tensor", builder.input((batch, m, n), dtype), y))
        case _:
            return _form(builder, y)
