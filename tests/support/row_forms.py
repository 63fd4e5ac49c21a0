"""Reduction and pointwise forms of a decoder layer."""

import torch
from form_builder import FormBuilder

from tune_model.runtime.program import Form, Ref


def rms_norm(rows: int, columns: int, dtype: str = "bfloat16") -> Form:
    """A residual add and an RMSNorm as transformers writes it; both results are read later."""
    b = FormBuilder("reduction")
    x, residual, weight = b.input((rows, columns), dtype), b.input((rows, columns), dtype), b.input((columns,), dtype)
    summed = b.call("add.Tensor", x, residual)
    wide = b.call("_to_copy.default", summed, dtype=torch.float32)
    mean = b.call("mean.dim", b.call("pow.Tensor_Scalar", wide, 2), [-1], True)
    scale = b.call("rsqrt.default", b.call("add.Tensor", mean, 1e-6))
    normal = b.call("_to_copy.default", b.call("mul.Tensor", wide, scale), dtype=getattr(torch, dtype))
    return b.form(summed, b.call("mul.Tensor", weight, normal))


def softmax(rows: int, columns: int, dtype: str = "float32") -> Form:
    """A softmax over the last dim."""
    b = FormBuilder("reduction")
    return b.form(b.call("softmax.int", b.input((rows, columns), dtype), -1))


def argmax(rows: int, columns: int, dtype: str = "bfloat16") -> Form:
    """The position of the largest of each row."""
    b = FormBuilder("reduction")
    return b.form(b.call("argmax.default", b.input((rows, columns), dtype), -1))


def gelu_chain(rows: int, columns: int, dtype: str = "bfloat16") -> Form:
    """Bias, tanh GELU and a scale per row."""
    b = FormBuilder()
    x, scale, bias = b.input((rows, columns), dtype), b.input((rows, 1), dtype), b.input((columns,), dtype)
    y = b.call("gelu.default", b.call("add.Tensor", x, bias), approximate="tanh")
    return b.form(b.call("mul.Tensor", y, scale))


def rope(tokens: int, heads: int, width: int, dtype: str = "bfloat16") -> Form:
    """A rotary embedding as extract states it: heads of a merged projection, angles shared by a token's heads."""
    b = FormBuilder()
    x = b.input((tokens, heads, width), dtype, (2 * heads * width, width, 1))
    return b.form(_turned(b, x, tokens, dtype))


def normal_rope(tokens: int, heads: int, width: int, dtype: str = "bfloat16") -> Form:
    """A norm of each head before it is rotated."""
    b = FormBuilder("reduction")
    x = b.input((tokens, heads, width), dtype, (2 * heads * width, width, 1))
    normal = b.call("rms_norm.default", x, [width], b.input((width,), dtype, role="weight"), 1e-6)
    return b.form(_turned(b, normal, tokens, dtype))


def _turned(b: FormBuilder, x: Ref, tokens: int, dtype: str) -> Ref:
    width = b.parameters[0].type.shape[-1]
    cos, sin = b.input((tokens, 1, width), dtype), b.input((tokens, 1, width), dtype)
    halves = b.call("slice.Tensor", x, -1, width // 2, width), b.call("slice.Tensor", x, -1, 0, width // 2)
    swapped = b.call("cat.default", [b.call("neg.default", halves[0]), halves[1]], -1)
    return b.call("add.Tensor", b.call("mul.Tensor", x, cos), b.call("mul.Tensor", swapped, sin))
