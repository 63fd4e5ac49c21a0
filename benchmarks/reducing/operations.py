"""Reductions with the pointwise work around them: as PyTorch code for the peers, as extract's form for the tuner."""

from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812 - what it is called everywhere

from tune_model.runtime.program import Arg, Call, Form, Items, Parameter, Ref, TensorType, TorchName

__all__ = ["OPERATIONS", "Operation", "operation_named"]

DTYPE: Final = "bfloat16"
EPS: Final = 1e-5
SCALE: Final = 0.125

Function = Callable[..., Tensor | tuple[Tensor, ...]]


class Operation(NamedTuple):
    """An operation over the rows of a matrix.

    Attributes:
        name: Of its rows in the result file.
        function: What eager and `torch.compile` run; its arguments are the form's parameters, its results the form's.
        form: The same for a number of rows and columns, as extract states it.
        chain: Eager runs several kernels: what fusing them gains is a figure of its own.
    """

    name: str
    function: Function
    form: Callable[[int, int], Form]
    chain: bool = False


def _matrix(rows: int, columns: int) -> TensorType:
    return TensorType(DTYPE, (rows, columns))


def _form(matrices: int, vectors: int, body: Sequence[Call], *results: str) -> Callable[[int, int], Form]:
    """Return a form of matrices, then weights of one row; results are matrices."""

    def make(rows: int, columns: int) -> Form:
        types = [(_matrix(rows, columns), "activation")] * matrices + [
            (TensorType(DTYPE, (columns,)), "weight")
        ] * vectors
        parameters = tuple(Parameter(f"a{i}", type_, role) for i, (type_, role) in enumerate(types))  # type: ignore[arg-type]
        calls = tuple(_sized(call, columns) for call in body)
        return Form("reduction", (), parameters, calls, tuple(Parameter(r, _matrix(rows, columns)) for r in results))

    return make


def _sized(call: Call, columns: int) -> Call:
    """Put the number of columns where the body says `normalized_shape`."""
    args = tuple(Items((columns,)) if a == _COLUMNS else a for a in call.args)
    return Call(call.op, args, call.kwargs, call.results)


_COLUMNS: Final[Arg] = Items((0,))


def _call(op: str, *args: Arg, result: str) -> Call:
    return Call(f"aten.{op}", args, (), (result,))


def _to_rows(
    op: str, *args: Arg, dtype: str = DTYPE, keywords: tuple[tuple[str, Arg], ...] = ()
) -> Callable[[int, int], Form]:
    """Return a form whose result is one value per row."""

    def make(rows: int, columns: int) -> Form:
        body = (Call(f"aten.{op}", (Ref("a0"), *args), keywords, ("t0",)),)
        result = Parameter("t0", TensorType(dtype, (rows, 1)))
        return Form("reduction", (), (Parameter("a0", _matrix(rows, columns)),), body, (result,))

    return make


def _rms_norm(x: Tensor, w: Tensor) -> Tensor:
    return F.rms_norm(x, x.shape[-1:], w, EPS)


def _residual_rms_norm(x: Tensor, residual: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    """As transformers writes it."""
    total = x + residual
    wide = total.float()
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + EPS)
    return w * wide.to(total.dtype), total


def _layer_norm(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return F.layer_norm(x, x.shape[-1:], w, b, EPS)


def _residual_layer_norm(x: Tensor, residual: Tensor, w: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    total = x + residual
    return F.layer_norm(total, x.shape[-1:], w, b, EPS), total


def _masked_softmax(x: Tensor, mask: Tensor) -> Tensor:
    return F.softmax(x * SCALE + mask, -1, dtype=torch.float32).to(x.dtype)


_FLOAT = TorchName("dtype", "float32")
_HALF = TorchName("dtype", DTYPE)
_ADD = _call("add.Tensor", Ref("a0"), Ref("a1"), result="t0")

OPERATIONS: Final = (
    Operation(
        "rms_norm",
        _rms_norm,
        _form(1, 1, [_call("rms_norm.default", Ref("a0"), _COLUMNS, Ref("a1"), EPS, result="t0")], "t0"),
    ),
    Operation(
        "residual+rms_norm",
        _residual_rms_norm,
        _form(
            2,
            1,
            [
                _ADD,
                _call("rms_norm.default", Ref("t0"), _COLUMNS, None, EPS, result="t1"),
                _call("mul.Tensor", Ref("t1"), Ref("a2"), result="t2"),
            ],
            "t2",
            "t0",
        ),
        chain=True,
    ),
    Operation(
        "layer_norm",
        _layer_norm,
        _form(1, 2, [_call("layer_norm.default", Ref("a0"), _COLUMNS, Ref("a1"), Ref("a2"), result="t0")], "t0"),
    ),
    Operation(
        "residual+layer_norm",
        _residual_layer_norm,
        _form(
            2,
            2,
            [_ADD, _call("layer_norm.default", Ref("t0"), _COLUMNS, Ref("a2"), Ref("a3"), result="t1")],
            "t1",
            "t0",
        ),
        chain=True,
    ),
    Operation(
        "softmax",
        lambda x: F.softmax(x, -1),
        _form(1, 0, [_call("softmax.int", Ref("a0"), -1, result="t0")], "t0"),
    ),
    Operation(
        "scale+mask+softmax",
        _masked_softmax,
        _form(
            2,
            0,
            [
                _call("mul.Scalar", Ref("a0"), SCALE, result="t0"),
                _call("add.Tensor", Ref("t0"), Ref("a1"), result="t1"),
                _call("to.dtype", Ref("t1"), _FLOAT, result="t2"),
                _call("softmax.int", Ref("t2"), -1, result="t3"),
                _call("to.dtype", Ref("t3"), _HALF, result="t4"),
            ],
            "t4",
        ),
        chain=True,
    ),
    Operation(
        "log_softmax",
        lambda x: F.log_softmax(x, -1),
        _form(1, 0, [_call("log_softmax.int", Ref("a0"), -1, result="t0")], "t0"),
    ),
    Operation("sum", lambda x: x.sum(-1, keepdim=True), _to_rows("sum.dim_IntList", Items((-1,)), True)),
    Operation("mean", lambda x: x.mean(-1, keepdim=True), _to_rows("mean.dim", Items((-1,)), True)),
    Operation(
        "var",
        lambda x: x.var(-1, keepdim=True),
        _to_rows("var.correction", Items((-1,)), keywords=(("keepdim", True),)),
    ),
    Operation(
        "argmax",
        lambda x: x.argmax(-1, keepdim=True),
        _to_rows("argmax.default", -1, True, dtype="int64"),
    ),
)


def operation_named(name: str) -> Operation:
    """Return an operation.

    Raises:
        KeyError: There is none of this name.
    """
    return {operation.name: operation for operation in OPERATIONS}[name]
