"""C++ names of element types, literals and conversions between them."""

import math

import torch

from tune_model.tune.loops.body import to_torch

__all__ = ["KEPT", "convert", "literal", "storage", "supported", "working"]

_STORAGE = {
    "float32": "float",
    "float64": "double",
    "bfloat16": "uint16_t",
    "float16": "uint16_t",
    "int64": "int64_t",
    "int32": "int32_t",
    "int16": "int16_t",
    "int8": "int8_t",
    "uint8": "uint8_t",
    "bool": "uint8_t",
}

_HALF = frozenset({"bfloat16", "float16"})

KEPT = {**_STORAGE, "bool": "int32_t"}
"""As `working`: what a value that is kept between passes is stored as."""


def supported(dtype: str) -> bool:
    """Say whether generated code can hold the element type."""
    return dtype in _STORAGE


def storage(dtype: str) -> str:
    """Return the C++ type of an element in memory."""
    return _STORAGE[dtype]


def working(dtype: str) -> str:
    """Return the C++ type of a value in a computation; truth is a 32-bit mask, half precision its bits."""
    return KEPT[dtype]


def literal(value: float, dtype: str) -> str:
    """Print a number exactly."""
    if dtype == "bool":
        return "int32_t(-1)" if value else "int32_t(0)"
    if dtype in _HALF:
        bits = int(torch.tensor(value, dtype=to_torch(dtype)).view(torch.int16).item())
        return f"uint16_t({bits & 0xFFFF})"
    if dtype in {"float32", "float64"}:
        return _floating(value, single=dtype == "float32")
    if dtype == "int64":
        # The most negative number has no literal.
        return f"int64_t({value}LL)" if value > -(2**63) else "INT64_MIN"
    return f"{_STORAGE[dtype]}({value})"


def _floating(value: float, *, single: bool) -> str:
    suffix = "f" if single else ""
    if math.isnan(value):
        return f'__builtin_nan{suffix}("")'
    if single:
        value = torch.tensor(value, dtype=torch.float32).item()
    if math.isinf(value):
        return f"{'-' if value < 0 else ''}__builtin_inf{suffix}()"
    return f"{float(value).hex()}{suffix}"


def convert(value: str, source: str, target: str, *, lanes: bool) -> str:
    """Print a conversion, of one number or of all lanes."""
    if source == target:
        return value
    if source in _HALF:
        return convert(f"from_{source}({value})", "float32", target, lanes=lanes)
    if target in _HALF:
        return f"to_{target}({convert(value, source, 'float32', lanes=lanes)})"
    if target == "bool":
        return f"mask_lanes({value})" if lanes else f"as_mask({value} != 0)"
    to = _STORAGE[target]
    if source == "bool":
        return f"from_mask<{to}>({value})" if lanes else f"{to}(-{value})"
    return f"convert_lanes<{to}>({value})" if lanes else f"{to}({value})"
