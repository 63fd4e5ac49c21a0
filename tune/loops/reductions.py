"""Rules of reductions and of what is made of them: softmax, norms, variance.

Half precision is reduced in float32 and rounded once, at the end, as ATen's own kernels do.
"""

import math
from collections.abc import Callable
from typing import Any

import torch

from tune_model.runtime.program import Ref
from tune_model.tune.loops.affine import Affine, divide
from tune_model.tune.loops.body import Unsupported, to_torch
from tune_model.tune.loops.builder import Builder, Coordinates, Reduced, Request, Rule, wide
from tune_model.tune.loops.ir import ReduceKind
from tune_model.tune.loops.pointwise import POINTWISE

__all__ = ["REDUCTIONS"]

Element = Callable[[Coordinates], int]


def _dims(given: Any, rank: int) -> tuple[int, ...]:
    if given is None or given == ():
        return tuple(range(rank))
    listed = given if isinstance(given, tuple) else (given,)
    return tuple(sorted(d + rank if d < 0 else d for d in listed))


def _number(b: Builder, value: float, node: int) -> int:
    return b.constant(value, b.dtype(node))


class _Rows:
    """One reduced operand: its full index at the result's index, and its elements in the compute dtype."""

    def __init__(self, b: Builder, r: Request, ref: Ref, dims: tuple[int, ...], *, dtype: str | None = None) -> None:
        self.b = b
        self.ref = ref
        self.shape = b.type_of(ref).shape
        self.dims = dims
        if not self.shape:
            raise Unsupported("a reduction of a scalar")
        self.dtype = dtype or wide(b.type_of(ref).dtype)
        self.size = math.prod(self.shape[d] for d in dims)
        self.at = self._full(r.at)

    def _full(self, index: Coordinates) -> Coordinates:
        """Accept the index of the operand itself, of the result with kept dims, or of the result without them."""
        if len(index) == len(self.shape):
            return index
        rest = iter(index)
        return tuple(Affine() if d in self.dims else next(rest) for d in range(len(self.shape)))

    def element(self, index: Coordinates) -> int:
        return self.b.cast(self.b.value(self.ref.name, index), self.dtype)

    def reduce(self, kind: ReduceKind, element: Element | None = None) -> int:
        return self.b.reduce(kind, self.shape, self.dims, Reduced(self.at, element or self.element, self.dtype))

    def mean(self, element: Element | None = None) -> int:
        total = self.reduce("sum", element)
        return self.b.op("div", total, _number(self.b, self.size, total))

    def squares(self, center: int) -> Element:
        def square(index: Coordinates) -> int:
            gap = self.b.op("sub", self.element(index), center)
            return self.b.op("mul", gap, gap)

        return square

    def variance(self, mean: int, correction: float) -> int:
        total = self.reduce("sum", self.squares(mean))
        return self.b.op("div", total, _number(self.b, max(self.size - correction, 0), total))


def _rows(b: Builder, r: Request, *, dtype: str | None = None, key: str = "dim") -> _Rows:
    ref = r.step.arguments["self"]
    return _Rows(b, r, ref, _dims(r.step.arguments.get(key), len(b.type_of(ref).shape)), dtype=dtype)


def _out(b: Builder, r: Request) -> str:
    return b.body.values[r.name].dtype


def _finish(b: Builder, r: Request, node: int) -> int:
    return b.cast(node, _out(b, r), implied=True)


def _sum(kind: ReduceKind) -> Rule:
    def rule(b: Builder, r: Request) -> int:
        return _finish(b, r, _rows(b, r, dtype=wide(_out(b, r))).reduce(kind))

    return rule


def _mean(b: Builder, r: Request) -> int:
    return _finish(b, r, _rows(b, r, dtype=wide(_out(b, r))).mean())


def _extreme(kind: ReduceKind) -> Rule:
    def rule(b: Builder, r: Request) -> int:
        arguments = r.step.arguments
        if isinstance(arguments.get("other"), Ref):  # `max.other` is elementwise
            return POINTWISE[f"aten.{kind}imum"](b, r)
        rows = _rows(b, r)
        if r.position == 1:
            return rows.reduce("argmax" if kind == "max" else "argmin")
        if rows.dtype == "bool":
            return rows.reduce("any" if kind == "max" else "all")
        return _finish(b, r, rows.reduce(kind))

    return rule


def _arg(kind: ReduceKind) -> Rule:
    def rule(b: Builder, r: Request) -> int:
        return _rows(b, r).reduce(kind)

    return rule


def _truth(kind: ReduceKind) -> Rule:
    def rule(b: Builder, r: Request) -> int:
        return b.cast(_rows(b, r, dtype="bool").reduce(kind), _out(b, r))

    return rule


def _correction(arguments: dict[str, Any]) -> float:
    if "correction" in arguments:
        given = arguments["correction"]
        return 1.0 if given is None else float(given)
    return 1.0 if arguments.get("unbiased", True) else 0.0


def _variance(b: Builder, r: Request) -> int:
    rows = _rows(b, r)
    mean = rows.mean()
    if r.step.op == "aten.var_mean" and r.position == 1:
        return _finish(b, r, mean)
    node = rows.variance(mean, _correction(r.step.arguments))
    return _finish(b, r, b.op("sqrt", node) if r.step.op == "aten.std" else node)


def _logsumexp(b: Builder, r: Request) -> int:
    rows = _rows(b, r, dtype=wide(_out(b, r)))
    top = rows.reduce("max")
    base = b.op("where", b.op("isinf", top, dtype="bool"), _number(b, 0, top), top)
    total = rows.reduce("sum", lambda i: b.op("exp", b.op("sub", rows.element(i), base)))
    return _finish(b, r, b.op("add", b.op("log", total), base))


def _norm(b: Builder, r: Request) -> int:
    order = r.step.arguments.get("ord", r.step.arguments.get("p"))
    order = 2.0 if order is None else float(order)
    rows = _rows(b, r, dtype=wide(_out(b, r)))

    def magnitude(index: Coordinates) -> int:
        return b.op("abs", rows.element(index))

    def power(index: Coordinates) -> int:
        x = rows.element(index)
        return b.op("mul", x, x) if order == 2 else b.op("pow", magnitude(index), _number(b, order, x))

    def nonzero(index: Coordinates) -> int:
        x = rows.element(index)
        return b.cast(b.op("ne", x, _number(b, 0, x), dtype="bool"), rows.dtype)

    if math.isinf(order):
        return _finish(b, r, rows.reduce("max" if order > 0 else "min", magnitude))
    if order in {0, 1}:
        return _finish(b, r, rows.reduce("sum", magnitude if order else nonzero))
    total = rows.reduce("sum", power)
    return _finish(b, r, b.op("sqrt", total) if order == 2 else b.op("pow", total, _number(b, 1 / order, total)))


def _softmax(b: Builder, r: Request) -> int:
    out = _out(b, r)
    ref = r.step.arguments["self"]
    given = r.step.arguments.get("dtype")
    rows = _rows(b, r, dtype=wide(out))
    if given is not None and wide(out) != out:  # the cast comes first and rounds

        def element(index: Coordinates) -> int:
            return b.cast(b.cast(b.value(ref.name, index), out), wide(out))
    else:
        element = rows.element
    top = rows.reduce("max", element)

    def shifted(index: Coordinates) -> int:
        return b.op("sub", element(index), top)

    total = rows.reduce("sum", lambda i: b.op("exp", shifted(i)))
    x = shifted(r.at)
    if r.step.op in {"aten.log_softmax", "aten._log_softmax"}:
        return _finish(b, r, b.op("sub", x, b.op("log", total)))
    # The sum is at least exp(0), so its reciprocal is exact enough, and taken once per row.
    return _finish(b, r, b.op("mul", b.op("exp", x), b.op("reciprocal", total)))


def _scaled(b: Builder, r: Request, node: int, dims: tuple[int, ...]) -> int:
    """Apply a norm's weight and bias, indexed by `dims` of the result's index."""
    own = tuple(r.at[d] for d in dims)
    for key, name in (("weight", "mul"), ("bias", "add")):
        ref = r.step.arguments.get(key)
        if ref is not None:
            node = b.op(name, node, b.cast(b.value(ref.name, own), b.dtype(node)))
    return node


def _normalized(b: Builder, r: Request) -> tuple[_Rows, tuple[int, ...]]:
    ref = r.step.arguments["input"]
    rank = len(b.type_of(ref).shape)
    dims = tuple(range(rank - len(r.step.arguments["normalized_shape"]), rank))
    return _Rows(b, r, ref, dims), dims


def _layer_norm(b: Builder, r: Request) -> int:
    rows, dims = _normalized(b, r)
    mean = rows.mean()
    if r.position == 1:
        return _finish(b, r, mean)
    variance = rows.variance(mean, 0)
    scale = b.op("rsqrt", b.op("add", variance, _number(b, r.step.arguments["eps"], variance)))
    if r.position == 2:
        return _finish(b, r, scale)
    node = b.op("mul", b.op("sub", rows.element(r.at), mean), scale)
    return _finish(b, r, _scaled(b, r, node, dims))


def _rms_norm(b: Builder, r: Request) -> int:
    rows, dims = _normalized(b, r)
    eps = r.step.arguments["eps"]
    if eps is None:
        eps = torch.finfo(to_torch(rows.dtype)).eps

    def square(index: Coordinates) -> int:
        x = rows.element(index)
        return b.op("mul", x, x)

    mean = rows.mean(square)
    scale = b.op("rsqrt", b.op("add", mean, _number(b, eps, mean)))
    if r.position == 1:
        return _finish(b, r, scale)
    return _finish(b, r, _scaled(b, r, b.op("mul", rows.element(r.at), scale), dims))


def _group_norm(b: Builder, r: Request) -> int:
    """Channels in groups: the operand is read as [n, group, channels of the group, ...]."""
    arguments = r.step.arguments
    ref = arguments["input"]
    shape = b.type_of(ref).shape
    groups: int = arguments["num_groups" if "num_groups" in arguments else "group"]
    width = shape[1] // groups
    grouped = (shape[0], groups, width, *shape[2:])
    dims = tuple(range(2, len(grouped)))
    dtype = wide(b.type_of(ref).dtype)
    if r.position:
        index = (*r.at, *(Affine(),) * len(dims))
    else:
        group, inner = divide(r.at[1], width, b.ranges)
        index = (r.at[0], group, inner, *r.at[2:])

    def element(at: Coordinates) -> int:
        return b.cast(b.value(ref.name, (at[0], at[1].times(width).plus(at[2]), *at[3:])), dtype)

    size = math.prod(grouped[2:])
    mean = b.reduce("sum", grouped, dims, Reduced(index, element, dtype))
    mean = b.op("div", mean, _number(b, size, mean))
    if r.position == 1:
        return _finish(b, r, mean)

    def square(at: Coordinates) -> int:
        gap = b.op("sub", element(at), mean)
        return b.op("mul", gap, gap)

    total = b.reduce("sum", grouped, dims, Reduced(index, square, dtype))
    variance = b.op("div", total, _number(b, size, total))
    scale = b.op("rsqrt", b.op("add", variance, _number(b, arguments["eps"], variance)))
    if r.position == 2:
        return _finish(b, r, scale)
    node = b.op("mul", b.op("sub", element(index), mean), scale)
    return _finish(b, r, _scaled(b, r, node, (1,)))


def _batch_norm(b: Builder, r: Request) -> int:
    arguments = r.step.arguments
    if arguments.get("training") or r.position:
        raise Unsupported("batch norm while training")
    dtype = wide(_out(b, r))
    x = b.operand(arguments["input"], r.at, dtype)
    mean, variance = (b.cast(b.value(arguments[k].name, (r.at[1],)), dtype) for k in ("running_mean", "running_var"))
    scale = b.op("rsqrt", b.op("add", variance, b.constant(arguments["eps"], dtype)))
    return _finish(b, r, _scaled(b, r, b.op("mul", b.op("sub", x, mean), scale), (1,)))


REDUCTIONS: dict[str, Rule] = {
    "aten.sum": _sum("sum"),
    "aten.prod": _sum("prod"),
    "aten.mean": _mean,
    **dict.fromkeys(("aten.amax", "aten.max"), _extreme("max")),
    **dict.fromkeys(("aten.amin", "aten.min"), _extreme("min")),
    "aten.argmax": _arg("argmax"),
    "aten.argmin": _arg("argmin"),
    "aten.any": _truth("any"),
    "aten.all": _truth("all"),
    **dict.fromkeys(("aten.var", "aten.std", "aten.var_mean"), _variance),
    "aten.logsumexp": _logsumexp,
    **dict.fromkeys(("aten.linalg_vector_norm", "aten.norm"), _norm),
    **dict.fromkeys(("aten.softmax", "aten._softmax", "aten.log_softmax", "aten._log_softmax"), _softmax),
    **dict.fromkeys(("aten.layer_norm", "aten.native_layer_norm"), _layer_norm),
    **dict.fromkeys(("aten.rms_norm", "aten._fused_rms_norm"), _rms_norm),
    **dict.fromkeys(("aten.group_norm", "aten.native_group_norm"), _group_norm),
    **dict.fromkeys(("aten._native_batch_norm_legit_no_training", "aten.batch_norm"), _batch_norm),
}
