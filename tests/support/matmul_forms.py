"""Matmul forms as extract states them, at one grid point or with a free number of rows."""

from form_builder import FormBuilder

from tune_model.runtime.program import Form


def linear(m: int, n: int, k: int, dtype: str = "bfloat16", *, tail: str = "") -> Form:
    """A linear layer of an [n, k] weight and what follows it: `bias`, `residual`, `gelu`, `swiglu` or nothing."""
    b = FormBuilder("matmul")
    x = b.input((m, k), dtype)
    w = b.input((n * 2 if tail == "swiglu" else n, k), dtype, role="weight")
    if tail == "bias":
        return b.form(b.call("linear.default", x, w, b.input((n,), dtype, role="weight")))
    y = b.call("linear.default", x, w)
    match tail:
        case "residual":
            return b.form(b.call("add.Tensor", b.input((m, n), dtype), y))
        case "gelu":
            bias = b.input((n,), dtype, role="weight")
            return b.form(b.call("gelu.default", b.call("add.Tensor", y, bias)), y)
        case "swiglu":
            gate, up = b.call("slice.Tensor", y, 1, 0, n), b.call("slice.Tensor", y, 1, n, 2 * n)
            return b.form(b.call("mul.Tensor", b.call("silu.default", gate), up))
        case _:
            return b.form(y)


def product(m: int, n: int, k: int, dtype: str = "float32") -> Form:
    """A product with a [k, n] matrix and a bias."""
    b = FormBuilder("matmul")
    bias, x = b.input((n,), dtype), b.input((m, k), dtype)
    return b.form(b.call("addmm.default", bias, x, b.input((k, n), dtype, role="weight")))
