"""Forms of linear layers as extract states them; tests compare with extract's own."""

from collections.abc import Sequence
from typing import Final, NamedTuple

from tune_model.runtime.program import Call, Form, Parameter, Ref, TensorType

__all__ = [
    "gelu_form",
    "gelu_tail",
    "linear_form",
    "llama_forms",
    "residual_form",
    "residual_tail",
    "swiglu_form",
    "swiglu_tail",
]

DTYPE: Final = "bfloat16"


def linear_form(m: int, n: int, k: int, *, bias: bool = False) -> Form:
    """Return a linear layer over m rows of k, its weight [n, k]."""
    return _form(m, n, k, _Tail(), bias=bias)


def gelu_form(m: int, n: int, k: int) -> Form:
    """Return a linear layer with a bias and the exact gelu."""
    return _form(m, n, k, _Tail((Call("aten.gelu.default", (Ref("t0"),), results=("t1",)),)), bias=True)


def residual_form(m: int, n: int, k: int, *, bias: bool = False) -> Form:
    """Return a linear layer whose result is added to a matrix of its size."""
    slot = "a3" if bias else "a2"
    tail = (Call("aten.add.Tensor", (Ref("t0"), Ref(slot)), results=("t1",)),)
    return _form(m, n, k, _Tail(tail, reads_residual=True), bias=bias)


def swiglu_form(m: int, n: int, k: int) -> Form:
    """Return a merged gate and up projection, its weight [n, k], and the gating: a result of n / 2 columns."""
    half = n // 2
    tail = (
        Call("aten.slice.Tensor", (Ref("t0"), -1, 0, half), results=("t1",)),
        Call("aten.silu.default", (Ref("t1"),), results=("t2",)),
        Call("aten.slice.Tensor", (Ref("t0"), -1, half, n), results=("t3",)),
        Call("aten.mul.Tensor", (Ref("t2"), Ref("t3")), results=("t4",)),
    )
    return _form(m, n, k, _Tail(tail, half))


def gelu_tail(m: int, n: int) -> Form:
    """Return what follows the product in `gelu_form`, as a form of its own."""
    whole = TensorType(DTYPE, (m * n,))
    call = Call("aten.gelu.default", (Ref("a0"),), results=("t0",))
    return Form("pointwise", (), (Parameter("a0", whole),), (call,), (Parameter("t0", whole),))


def residual_tail(m: int, n: int) -> Form:
    """Return what follows the product in `residual_form`."""
    whole = TensorType(DTYPE, (m * n,))
    call = Call("aten.add.Tensor", (Ref("a0"), Ref("a1")), results=("t0",))
    parameters = (Parameter("a0", whole), Parameter("a1", whole))
    return Form("pointwise", (), parameters, (call,), (Parameter("t0", whole),))


def swiglu_tail(m: int, n: int) -> Form:
    """Return what follows the product in `swiglu_form`: both inputs are halves of its rows."""
    half = TensorType(DTYPE, (m, n // 2), (n, 1))
    body = (
        Call("aten.silu.default", (Ref("a0"),), results=("t0",)),
        Call("aten.mul.Tensor", (Ref("t0"), Ref("a1")), results=("t1",)),
    )
    result = Parameter("t1", TensorType(DTYPE, (m, n // 2)))
    return Form("pointwise", (), (Parameter("a0", half), Parameter("a1", half)), body, (result,))


class _Tail(NamedTuple):
    calls: tuple[Call, ...] = ()
    columns: int = 0
    reads_residual: bool = False


def _form(m: int, n: int, k: int, tail: _Tail, *, bias: bool = False) -> Form:
    parameters = [Parameter("a0", TensorType(DTYPE, (m, k))), Parameter("a1", TensorType(DTYPE, (n, k)), "weight")]
    if bias:
        parameters.append(Parameter("a2", TensorType(DTYPE, (n,)), "weight"))
    read = tuple(Ref(p.name) for p in parameters)
    if tail.reads_residual:
        parameters.append(Parameter(f"a{len(parameters)}", TensorType(DTYPE, (m, n))))
    body = (Call("aten.linear.default", read, results=("t0",)), *tail.calls)
    result = Parameter(body[-1].results[0] or "", TensorType(DTYPE, (m, tail.columns or n)))
    return Form("matmul", (), tuple(parameters), body, (result,))


def llama_forms(decode: Sequence[int], prefill: Sequence[int], scale: int = 1) -> tuple[Form, ...]:
    """Return the distinct matmuls of Llama-3-8B, merged and with their epilogues, heaviest first.

    Args:
        decode: Batch sizes.
        prefill: Lengths of one prompt, of which the last position alone gets logits.
        scale: Sizes are divided by this.
    """
    hidden, inner, heads, vocabulary = 4096 // scale, 14336 // scale, 6144 // scale, 128256 // scale
    forms: dict[Form, None] = {}
    for m in sorted({*decode, *prefill}, reverse=True):
        forms[swiglu_form(m, 2 * inner, hidden)] = None
        forms[residual_form(m, hidden, inner)] = None
        forms[linear_form(m, heads, hidden)] = None
        forms[residual_form(m, hidden, hidden)] = None
        if m in decode:
            forms[linear_form(m, vocabulary, hidden)] = None
    if prefill:
        forms[linear_form(1, vocabulary, hidden)] = None
    return tuple(forms)
