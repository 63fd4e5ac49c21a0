"""Rules of elementwise calls, spelled out in the few operations of `ir`, rounded where ATen rounds."""

import math
from collections.abc import Callable
from typing import Any

import torch

from tune_model.runtime.program import Ref
from tune_model.tune.loops.body import Unsupported, dtype_name, to_torch
from tune_model.tune.loops.builder import Builder, RawIndex, Request, Rule, wide

__all__ = ["POINTWISE"]

Formula = Callable[[Builder, int, dict[str, Any]], int]
"""From the operand in the compute dtype and the call's arguments."""


def _finish(b: Builder, r: Request, node: int) -> int:
    return b.cast(node, b.body.values[r.name].dtype, implied=True)


def _compute(b: Builder, r: Request) -> str:
    return wide(b.body.values[r.name].dtype)


def _example(b: Builder, arg: Any) -> Any:
    if isinstance(arg, Ref):
        kind = b.type_of(arg)
        return torch.empty(kind.shape, dtype=to_torch(kind.dtype), device="meta")
    return arg


def _common(b: Builder, first: Any, second: Any) -> str:
    return wide(dtype_name(torch.result_type(_example(b, first), _example(b, second))))


def _unary(formula: Formula) -> Rule:
    def rule(b: Builder, r: Request) -> int:
        x = b.operand(r.step.arguments["self"], r.at, _compute(b, r))
        return _finish(b, r, formula(b, x, r.step.arguments))

    return rule


def _plain(name: str) -> Rule:
    return _unary(lambda b, x, _: b.op(name, x))


def _test(name: str) -> Rule:
    def rule(b: Builder, r: Request) -> int:
        ref = r.step.arguments["self"]
        dtype = wide(b.type_of(ref).dtype)
        x = b.operand(ref, r.at, dtype)
        if name == "not":
            return b.op("not", b.cast(x, "bool"))
        if not dtype.startswith("float"):
            return b.constant(False, "bool")
        return b.op(name, x, dtype="bool")

    return rule


def _number(b: Builder, value: float, x: int) -> int:
    return b.constant(value, b.dtype(x))


def _silu(b: Builder, x: int, _: dict[str, Any]) -> int:
    return b.op("div", x, b.op("add", _number(b, 1, x), b.op("exp", b.op("neg", x))))


def _gelu(b: Builder, x: int, arguments: dict[str, Any]) -> int:
    half = b.op("mul", x, _number(b, 0.5, x))
    if arguments["approximate"] == "tanh":
        cube = b.op("mul", b.op("mul", x, x), x)
        inner = b.op("add", x, b.op("mul", cube, _number(b, 0.044715, x)))
        gate = b.op("tanh", b.op("mul", inner, _number(b, math.sqrt(2 / math.pi), x)))
    else:
        gate = b.op("erf", b.op("mul", x, _number(b, math.sqrt(0.5), x)))
    return b.op("mul", half, b.op("add", gate, _number(b, 1, x)))


def _relu(b: Builder, x: int, _: dict[str, Any]) -> int:
    return b.op("maximum", x, _number(b, 0, x))


def _relu6(b: Builder, x: int) -> int:
    return b.op("minimum", b.op("maximum", b.op("add", x, _number(b, 3, x)), _number(b, 0, x)), _number(b, 6, x))


def _hardsigmoid(b: Builder, x: int, _: dict[str, Any]) -> int:
    return b.op("div", _relu6(b, x), _number(b, 6, x))


def _hardswish(b: Builder, x: int, _: dict[str, Any]) -> int:
    return b.op("div", b.op("mul", x, _relu6(b, x)), _number(b, 6, x))


def _hardtanh(b: Builder, x: int, arguments: dict[str, Any]) -> int:
    low, high = _number(b, arguments["min_val"], x), _number(b, arguments["max_val"], x)
    return b.op("minimum", b.op("maximum", x, low), high)


def _softplus(b: Builder, x: int, arguments: dict[str, Any]) -> int:
    beta = _number(b, arguments["beta"], x)
    scaled = b.op("mul", x, beta)
    soft = b.op("div", b.op("log1p", b.op("exp", scaled)), beta)
    return b.op("where", b.op("gt", scaled, _number(b, arguments["threshold"], x), dtype="bool"), x, soft)


def _mish(b: Builder, x: int, _: dict[str, Any]) -> int:
    return b.op("mul", x, b.op("tanh", b.op("log1p", b.op("exp", x))))


def _leaky_relu(b: Builder, x: int, arguments: dict[str, Any]) -> int:
    slope = b.op("mul", x, _number(b, arguments["negative_slope"], x))
    return b.op("where", b.op("gt", x, _number(b, 0, x), dtype="bool"), x, slope)


def _elu(b: Builder, x: int, arguments: dict[str, Any]) -> int:
    alpha, scale, inner = (arguments[k] for k in ("alpha", "scale", "input_scale"))
    below = b.op("mul", b.op("expm1", b.op("mul", x, _number(b, inner, x))), _number(b, alpha * scale, x))
    above = b.op("mul", x, _number(b, scale, x))
    return b.op("where", b.op("gt", x, _number(b, 0, x), dtype="bool"), above, below)


def _threshold(b: Builder, x: int, arguments: dict[str, Any]) -> int:
    at = _number(b, arguments["threshold"], x)
    return b.op("where", b.op("le", x, at, dtype="bool"), _number(b, arguments["value"], x), x)


def _log_sigmoid(b: Builder, x: int, _: dict[str, Any]) -> int:
    zero = _number(b, 0, x)
    return b.op("sub", b.op("minimum", zero, x), b.op("log1p", b.op("exp", b.op("neg", b.op("abs", x)))))


def _square(b: Builder, x: int, _: dict[str, Any]) -> int:
    return b.op("mul", x, x)


def _round(b: Builder, x: int, arguments: dict[str, Any]) -> int:
    if arguments.get("decimals", 0):
        raise Unsupported("rounding to decimals")
    return b.op("round", x)


def _nan_to_num(b: Builder, x: int, arguments: dict[str, Any]) -> int:
    limits = torch.finfo(to_torch(b.dtype(x)))
    high = limits.max if arguments["posinf"] is None else arguments["posinf"]
    low = limits.min if arguments["neginf"] is None else arguments["neginf"]
    infinity = _number(b, math.inf, x)
    node = b.op("where", b.op("isnan", x, dtype="bool"), _number(b, arguments["nan"] or 0.0, x), x)
    node = b.op("where", b.op("eq", x, infinity, dtype="bool"), _number(b, high, x), node)
    return b.op("where", b.op("eq", x, b.op("neg", infinity), dtype="bool"), _number(b, low, x), node)


def _half_nan_to_num(b: Builder, r: Request) -> int:
    if b.body.values[r.name].dtype in {"bfloat16", "float16"}:
        raise Unsupported("nan_to_num of half precision")  # its limits are the narrow type's
    return _unary(_nan_to_num)(b, r)


def _power(b: Builder, r: Request) -> int:
    """Constant exponents take the same shortcuts as ATen."""
    exponent, dtype = r.step.arguments["exponent"], _compute(b, r)
    x = b.operand(r.step.arguments["self"], r.at, dtype)
    one = b.constant(1, dtype)
    square = b.op("mul", x, x)
    floating = dtype.startswith("float")
    match exponent:
        case Ref():
            node = b.op("pow", x, b.operand(exponent, r.at, dtype))
        case 0:
            node = one
        case 1:
            node = x
        case 2:
            node = square
        case 3:
            node = b.op("mul", square, x)
        case 0.5 if floating:
            node = b.op("sqrt", x)
        case -0.5 if floating:
            node = b.op("rsqrt", x)
        case -1 if floating:
            node = b.op("reciprocal", x)
        case -2 if floating:
            node = b.op("reciprocal", square)
        case _:
            node = b.op("pow", x, b.constant(exponent, dtype))
    return _finish(b, r, node)


def _binary(name: str, *, first: str = "self", second: str = "other") -> Rule:
    def rule(b: Builder, r: Request) -> int:
        dtype = _compute(b, r)
        x = b.operand(r.step.arguments[first], r.at, dtype)
        y = b.operand(r.step.arguments[second], r.at, dtype)
        alpha = r.step.arguments.get("alpha", 1)
        if alpha != 1:
            y = b.op("mul", y, b.constant(alpha, dtype))
        if dtype == "bool":
            return _on_bool(b, name, x, y)
        return _finish(b, r, b.op(name, x, y))

    return rule


def _on_bool(b: Builder, name: str, x: int, y: int) -> int:
    same = {"add": "or", "maximum": "or", "mul": "and", "minimum": "and", "and": "and", "or": "or", "xor": "xor"}
    if name not in same:
        raise Unsupported(f"{name} of bools")
    return b.op(same[name], x, y)


def _compare(name: str) -> Rule:
    def rule(b: Builder, r: Request) -> int:
        first, second = r.step.arguments["self"], r.step.arguments["other"]
        dtype = _common(b, first, second)
        return b.op(name, b.operand(first, r.at, dtype), b.operand(second, r.at, dtype), dtype="bool")

    return rule


def _logical(name: str) -> Rule:
    def rule(b: Builder, r: Request) -> int:
        operands = [r.step.arguments[k] for k in ("self", "other")]
        kinds = [wide(b.type_of(o).dtype) for o in operands]
        x, y = (b.cast(b.operand(o, r.at, k), "bool") for o, k in zip(operands, kinds, strict=True))
        return b.op(name, x, y)

    return rule


def _divide(b: Builder, r: Request) -> int:
    mode = r.step.arguments.get("rounding_mode")
    if r.step.op == "aten.floor_divide":
        mode = "floor"
    name = {None: "div", "floor": "floordiv", "trunc": "truncdiv"}[mode]
    dtype = _compute(b, r)
    x = b.operand(r.step.arguments["self"], r.at, dtype)
    return _finish(b, r, b.op(name, x, b.operand(r.step.arguments["other"], r.at, dtype)))


def _bitwise_not(b: Builder, r: Request) -> int:
    x = b.value(r.step.arguments["self"].name, r.at)
    return b.op("not", x)


def _where(b: Builder, r: Request) -> int:
    arguments, dtype = r.step.arguments, b.body.values[r.name].dtype
    if "other" not in arguments:
        raise Unsupported("where without values")
    condition = b.operand(arguments["condition"], r.at, "bool")
    return b.op(
        "where", condition, b.operand(arguments["self"], r.at, dtype), b.operand(arguments["other"], r.at, dtype)
    )


def _masked_fill(b: Builder, r: Request) -> int:
    arguments, dtype = r.step.arguments, b.body.values[r.name].dtype
    mask = b.operand(arguments["mask"], r.at, "bool")
    value = b.operand(arguments["value"], r.at, dtype)
    return b.op("where", mask, value, b.operand(arguments["self"], r.at, dtype))


def _clamp(b: Builder, r: Request) -> int:
    dtype = _compute(b, r)
    node = b.operand(r.step.arguments["self"], r.at, dtype)
    for key, name in (("min", "maximum"), ("max", "minimum")):
        limit = r.step.arguments.get(key)
        if limit is not None:
            node = b.op(name, node, b.operand(limit, r.at, dtype))
    return _finish(b, r, node)


def _addc(name: str) -> Rule:
    def rule(b: Builder, r: Request) -> int:
        dtype = _compute(b, r)
        x, t1, t2 = (b.operand(r.step.arguments[k], r.at, dtype) for k in ("self", "tensor1", "tensor2"))
        scaled = b.op("mul", t1, b.constant(r.step.arguments["value"], dtype))
        return _finish(b, r, b.op("add", x, b.op(name, scaled, t2)))

    return rule


def _lerp(b: Builder, r: Request) -> int:
    dtype = _compute(b, r)
    x, end, weight = (b.operand(r.step.arguments[k], r.at, dtype) for k in ("self", "end", "weight"))
    gap = b.op("sub", end, x)
    near = b.op("add", x, b.op("mul", weight, gap))
    far = b.op("sub", end, b.op("mul", gap, b.op("sub", b.constant(1, dtype), weight)))
    small = b.op("lt", b.op("abs", weight), b.constant(0.5, dtype), dtype="bool")
    return _finish(b, r, b.op("where", small, near, far))


def _to(b: Builder, r: Request) -> int:
    return b.cast(b.value(r.step.arguments["self"].name, r.at), b.body.values[r.name].dtype)


def _dropout(b: Builder, r: Request) -> int:
    if r.step.arguments.get("train") and r.step.arguments["p"]:
        raise Unsupported("dropout while training")
    source: Ref = r.step.arguments["input"]
    return b.value(source.name, r.at)


def _filled(b: Builder, r: Request) -> int:
    arguments = r.step.arguments
    name = r.step.op.removeprefix("aten.").removesuffix("_like").removeprefix("new_")
    dtype = b.body.values[r.name].dtype
    value: Any = {"zeros": 0, "ones": 1}.get(name)
    if value is None:
        value = next(arguments[k] for k in ("fill_value", "value", "s") if k in arguments)
    return b.operand(value, r.at, dtype)


def _arange(b: Builder, r: Request) -> int:
    start, step = r.step.arguments.get("start", 0), r.step.arguments.get("step", 1)
    dtype = b.body.values[r.name].dtype
    if not isinstance(start, int) or not isinstance(step, int):
        raise Unsupported("arange over floats")
    return b.cast(b.add(RawIndex(r.at[0].times(step).shift(start), "int64")), dtype)


def _triangle(b: Builder, r: Request) -> int:
    dtype = b.body.values[r.name].dtype
    gap = b.add(RawIndex(r.at[-1].plus(r.at[-2].times(-1)).shift(-r.step.arguments["diagonal"]), "int64"))
    keep = b.op("le" if r.step.op == "aten.tril" else "ge", gap, b.constant(0, "int64"), dtype="bool")
    return b.op("where", keep, b.value(r.step.arguments["self"].name, r.at), b.constant(0, dtype))


_SAME = (
    "neg abs sign floor ceil trunc reciprocal sqrt rsqrt exp exp2 expm1 log log2 log10 log1p "
    "sin cos tan atan sinh cosh tanh erf sigmoid"
)

POINTWISE: dict[str, Rule] = {
    **{f"aten.{name}": _plain(name) for name in _SAME.split()},
    "aten.sgn": _plain("sign"),
    "aten.fix": _plain("trunc"),
    "aten.round": _unary(_round),
    "aten.relu": _unary(_relu),
    "aten.silu": _unary(_silu),
    "aten.gelu": _unary(_gelu),
    "aten.hardsigmoid": _unary(_hardsigmoid),
    "aten.hardswish": _unary(_hardswish),
    "aten.hardtanh": _unary(_hardtanh),
    "aten.softplus": _unary(_softplus),
    "aten.mish": _unary(_mish),
    "aten.leaky_relu": _unary(_leaky_relu),
    "aten.elu": _unary(_elu),
    "aten.threshold": _unary(_threshold),
    "aten.log_sigmoid": _unary(_log_sigmoid),
    "aten.square": _unary(_square),
    "aten.nan_to_num": _half_nan_to_num,
    "aten.isnan": _test("isnan"),
    "aten.isinf": _test("isinf"),
    "aten.logical_not": _test("not"),
    "aten.bitwise_not": _bitwise_not,
    "aten.pow": _power,
    "aten.add": _binary("add"),
    "aten.sub": _binary("sub"),
    "aten.rsub": _binary("sub", first="other", second="self"),
    "aten.mul": _binary("mul"),
    "aten.div": _divide,
    "aten.true_divide": _divide,
    "aten.floor_divide": _divide,
    "aten.remainder": _binary("remainder"),
    "aten.fmod": _binary("fmod"),
    "aten.atan2": _binary("atan2"),
    "aten.maximum": _binary("maximum"),
    "aten.minimum": _binary("minimum"),
    **{f"aten.bitwise_{name}": _binary(name) for name in ("and", "or", "xor")},
    **{f"aten.logical_{name}": _logical(name) for name in ("and", "or", "xor")},
    **{f"aten.{name}": _compare(name) for name in ("eq", "ne", "lt", "le", "gt", "ge")},
    "aten.where": _where,
    "aten.masked_fill": _masked_fill,
    **dict.fromkeys(("aten.clamp", "aten.clamp_min", "aten.clamp_max"), _clamp),
    "aten.addcmul": _addc("mul"),
    "aten.addcdiv": _addc("div"),
    "aten.lerp": _lerp,
    **dict.fromkeys(("aten._to_copy", "aten.to", "aten.type_as", "aten._cast"), _to),
    **dict.fromkeys(("aten.dropout", "aten.native_dropout"), _dropout),
    **{f"aten.{name}": _filled for name in ("scalar_tensor", "fill")},
    **{f"aten.{name}{suffix}": _filled for name in ("full", "zeros", "ones") for suffix in ("", "_like")},
    **{f"aten.new_{name}": _filled for name in ("full", "zeros", "ones")},
    "aten.arange": _arange,
    "aten.tril": _triangle,
    "aten.triu": _triangle,
}
