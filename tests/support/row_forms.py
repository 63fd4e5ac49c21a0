"""Reduction and pointwise forms of a decoder layer."""

import torch
from form_builder import FormBuilder

from tune_model.runtime.program import Form


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
