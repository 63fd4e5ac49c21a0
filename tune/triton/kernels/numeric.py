"""Functions that generated kernels call where Triton's own differ from ATen's definition (tune/loops/ir.py lists them).

Halves never arrive here: arithmetic happens in float32 or float64, integers keep their type.
"""

import triton
import triton.language as tl
from triton.language.extra import libdevice


@triton.jit
def divide(a, b):
    """Divide floats with IEEE rounding, as ATen does; Triton's `/` may be two units off in float32."""
    if a.dtype == tl.float32:
        return tl.div_rn(a, b)
    else:  # noqa: RET505 (Triton evaluates both branches' types otherwise)
        return a / b


@triton.jit
def reciprocal(a):
    """Divide one by a float; of an infinity it is zero."""
    return divide(tl.full(a.shape, 1.0, a.dtype), a)


@triton.jit
def square_root(a):
    """Take the square root with IEEE rounding."""
    if a.dtype == tl.float32:
        return tl.sqrt_rn(a)
    else:  # noqa: RET505
        return tl.sqrt(a)


@triton.jit
def sign(a):
    """Return -1, 0 or 1; 0 for NaN, as ATen does."""
    return tl.where(a > 0, 1, tl.where(a < 0, -1, 0)).to(a.dtype)


@triton.jit
def sigmoid(a):
    """Compute 1 / (1 + exp(-a))."""
    return 1.0 / (1.0 + tl.exp(-a))


@triton.jit
def floor_divide(a, b):
    """Divide integers, rounding to minus infinity; Triton's `//` rounds to zero."""
    quotient = a // b
    return tl.where((a % b != 0) & ((a < 0) != (b < 0)), quotient - 1, quotient)


@triton.jit
def floor_divide_floats(a, b):
    """Divide floats and round down as Python does."""
    rest = libdevice.fmod(a, b)
    quotient = divide(a - rest, b)
    quotient = tl.where((rest != 0) & ((b < 0) != (rest < 0)), quotient - 1, quotient)
    rounded = tl.floor(quotient)
    rounded = tl.where(quotient - rounded > 0.5, rounded + 1, rounded)
    return tl.where(b == 0, divide(a, b), tl.where(quotient == 0, quotient * 0, rounded))


@triton.jit
def remainder(a, b):
    """Return the integer remainder with the divisor's sign."""
    rest = a % b
    return tl.where((rest != 0) & ((rest < 0) != (b < 0)), rest + b, rest)


@triton.jit
def remainder_floats(a, b):
    """Return the remainder of floats with the divisor's sign."""
    rest = libdevice.fmod(a, b)
    return tl.where((rest != 0) & ((rest < 0) != (b < 0)), rest + b, rest)


@triton.jit
def maximum(a, b):
    """Return the larger; a NaN operand gives NaN."""
    if a.dtype.is_floating():
        return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)
    else:  # noqa: RET505
        return tl.maximum(a, b)


@triton.jit
def minimum(a, b):
    """Return the smaller; a NaN operand gives NaN."""
    if a.dtype.is_floating():
        return tl.minimum(a, b, propagate_nan=tl.PropagateNan.ALL)
    else:  # noqa: RET505
        return tl.minimum(a, b)


@triton.jit
def multiply(a, b):
    """Multiply; combines the parts of a product reduction."""
    return a * b
