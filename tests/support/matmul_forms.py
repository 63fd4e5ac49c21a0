"""Linear layers with what models put after them."""

from form_builder import FormBuilder

from tune_model.runtime.program import Form, Ref


def linear(
    rows: int, columns: int, length: int, dtype: str = "float32", *, bias: bool = True
) -> tuple[FormBuilder, Ref]:
    b = FormBuilder("matmul")
    x, w = b.input((rows, length), dtype), b.input((columns, length), dtype, role="weight")
    product = b.call("linear.default", x, w, b.input((columns,), dtype, role="weight") if bias else None)
    return b, product


def plain(rows: int, dtype: str = "float32") -> Form:
    b, t = linear(rows, 40, 72, dtype)
    return b.form(t)


def gelu(rows: int, dtype: str = "float32", approximate: str = "none") -> Form:
    b, t = linear(rows, 40, 72, dtype)
    return b.form(b.call("gelu.default", t, approximate=approximate))


def residual(rows: int, dtype: str = "float32") -> Form:
    b, t = linear(rows, 40, 72, dtype, bias=False)
    return b.form(b.call("add.Tensor", b.input((rows, 40), dtype), t))


def scaled_silu_residual(rows: int, dtype: str = "float32") -> Form:
    b, t = linear(rows, 40, 72, dtype)
    activated = b.call("silu.default", b.call("mul.Tensor", t, 0.5))
    return b.form(b.call("add.Tensor", activated, b.input((rows, 40), dtype)))


def swiglu(rows: int, dtype: str = "float32") -> Form:
    b, t = linear(rows, 80, 72, dtype, bias=False)
    gate, up = b.call("split_with_sizes.default", t, [40, 40], 1, results=2)
    return b.form(b.call("mul.Tensor", b.call("silu.default", gate), up))


def addmm(rows: int, dtype: str = "float32") -> Form:
    b = FormBuilder("matmul")
    x, w, c = b.input((rows, 72), dtype), b.input((40, 72), dtype, role="weight"), b.input((40,), dtype, role="weight")
    return b.form(b.call("relu.default", b.call("addmm.default", c, x, b.call("t.default", w))))


LINEAR_FORMS = {
    "plain": plain,
    "gelu": gelu,
    "gelu tanh": lambda rows, dtype="float32": gelu(rows, dtype, "tanh"),
    "residual": residual,
    "scaled silu residual": scaled_silu_residual,
    "swiglu": swiglu,
    "addmm": addmm,
}
