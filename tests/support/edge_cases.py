"""Regions and inputs at the edges of what numbers can hold: masks, NaN, infinities, overflow, single elements."""

import math
from collections.abc import Callable, Iterator

import torch
from form_builder import FormBuilder, random_inputs

from tune_model.runtime.program import Form

Make = Callable[[int, int, str], Form]


def _rows(op: str, *arguments: object, dims: bool = True, **keywords: object) -> Make:
    def make(rows: int, columns: int, dtype: str) -> Form:
        b = FormBuilder("reduction")
        given = arguments or (([-1],) if dims else (-1,))
        return b.form(b.call(op, b.input((rows, columns), dtype), *given, **keywords))

    return make


def _masked_softmax(rows: int, columns: int, dtype: str) -> Form:
    b = FormBuilder("reduction")
    x, mask = b.input((rows, columns), dtype), b.input((rows, columns), dtype)
    wide = b.call("_to_copy.default", b.call("add.Tensor", b.call("mul.Tensor", x, 0.5), mask), dtype=torch.float32)
    soft = b.call("_softmax.default", wide, -1, False)
    return b.form(b.call("_to_copy.default", soft, dtype=getattr(torch, dtype)))


def _residual_norm(rows: int, columns: int, dtype: str) -> Form:
    b = FormBuilder("reduction")
    x, y, w = b.input((rows, columns), dtype), b.input((rows, columns), dtype), b.input((columns,), dtype)
    total = b.call("add.Tensor", x, y)
    return b.form(total, b.call("rms_norm.default", total, [columns], w, 1e-6))


def _layer_norm(rows: int, columns: int, dtype: str) -> Form:
    b = FormBuilder("reduction")
    x, w = b.input((rows, columns), dtype), b.input((columns,), dtype)
    return b.form(b.call("layer_norm.default", x, [columns], w, w, 1e-5))


def _chain(rows: int, columns: int, dtype: str) -> Form:
    b = FormBuilder()
    x, y = b.input((rows, columns), dtype), b.input((rows, columns), dtype)
    picked = b.call("where.self", b.call("isinf.default", y), x, b.call("maximum.default", x, y))
    return b.form(b.call("mul.Tensor", b.call("silu.default", x), y), b.call("clamp.default", picked, -1e4, 1e4))


REGIONS: dict[str, Make] = {
    "softmax": _rows("_softmax.default", -1, False),
    "log_softmax": _rows("_log_softmax.default", -1, False),
    "mask and softmax": _masked_softmax,
    "logsumexp": _rows("logsumexp.default"),
    "amax": _rows("amax.default"),
    "amin": _rows("amin.default"),
    "argmax": _rows("argmax.default", dims=False),
    "argmin": _rows("argmin.default", dims=False),
    "sum": _rows("sum.dim_IntList"),
    "mean": _rows("mean.dim"),
    "variance": _rows("var.correction", [-1], correction=0),
    "norm": _rows("linalg_vector_norm.default", 2, [-1]),
    "largest size": _rows("linalg_vector_norm.default", math.inf, [-1]),
    "residual and norm": _residual_norm,
    "layer norm": _layer_norm,
    "chain": _chain,
}


def edges(form: Form) -> Iterator[tuple[str, list[torch.Tensor]]]:
    """Yield inputs by what is special about them."""
    yield "ordinary", random_inputs(form)
    for name, put in _EDGES.items():
        inputs = random_inputs(form, seed=1)
        for tensor in inputs:
            if tensor.dim() == 2 and tensor.is_floating_point():
                put(tensor)
        yield name, inputs


def _mask(x: torch.Tensor) -> None:
    """A causal mask's rows: one element left, then more; the first row sees nothing at all."""
    hidden = torch.arange(x.shape[1]) >= torch.arange(x.shape[0])[:, None]
    x[hidden] = -math.inf


def _nan(x: torch.Tensor) -> None:
    x[0, -1] = math.nan
    x[-1] = math.nan


def _infinities(x: torch.Tensor) -> None:
    x[0, 0] = math.inf
    x[-1, -1] = -math.inf


def _opposite(x: torch.Tensor) -> None:
    x[0, 0], x[0, -1] = math.inf, -math.inf


def _large(x: torch.Tensor) -> None:
    """What float16 can just hold: sums, squares and exponentials leave it."""
    x[0] = 60000.0
    x[-1] = torch.linspace(-60000.0, 60000.0, x.shape[1]).to(x.dtype)


def _tiny(x: torch.Tensor) -> None:
    """Below the normal numbers of float16."""
    x.mul_(3e-6)
    x[0] = 0.0


def _equal(x: torch.Tensor) -> None:
    """No spread, and every element the largest."""
    x.fill_(-3.25)


_EDGES = {
    "masked": _mask,
    "not a number": _nan,
    "infinities": _infinities,
    "both infinities": _opposite,
    "large": _large,
    "tiny": _tiny,
    "equal": _equal,
}

SHAPES = ((5, 37), (1, 1), (4, 1), (1, 64))
"""Rows and columns: ragged, a single element, single columns, a whole row."""
