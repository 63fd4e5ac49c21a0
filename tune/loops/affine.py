"""Index arithmetic: integers that are linear in loop variables, and what a reshape does to them.

A reshape that would need `i // 7` is answered by splitting the variable: `NeedSplit` asks the caller to start again
with `i = outer * 7 + inner`, after which every index is linear again.
"""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

__all__ = [
    "ZERO",
    "Affine",
    "NeedSplit",
    "NotAffineError",
    "Ranges",
    "divide",
    "flatten",
    "limits",
    "reshape",
    "variable",
]


class Affine(NamedTuple):
    """`constant + sum(coefficient * variable)`; terms are sorted by variable and never zero."""

    terms: tuple[tuple[int, int], ...] = ()
    constant: int = 0

    def plus(self, other: "Affine") -> "Affine":
        """Add two indices."""
        total = dict(self.terms)
        for v, c in other.terms:
            total[v] = total.get(v, 0) + c
        return Affine(tuple(sorted((v, c) for v, c in total.items() if c)), self.constant + other.constant)

    def times(self, factor: int) -> "Affine":
        """Multiply by an integer."""
        if factor == 0:
            return ZERO
        return Affine(tuple((v, c * factor) for v, c in self.terms), self.constant * factor)

    def shift(self, by: int) -> "Affine":
        """Add an integer."""
        return Affine(self.terms, self.constant + by)

    def variables(self) -> frozenset[int]:
        """Return the variables it depends on."""
        return frozenset(v for v, _ in self.terms)


ZERO = Affine()


class NeedSplit(Exception):  # noqa: N818 - a request to start again, not an error
    """The variable must become two, the inner one of `factor` values."""

    def __init__(self, variable: int, factor: int) -> None:
        super().__init__(f"split variable {variable} by {factor}")
        self.variable = variable
        self.factor = factor


class NotAffineError(Exception):
    """No split makes the index linear."""


class Ranges(NamedTuple):
    """What each variable runs over: its size, and `low <= v <= high` where a condition in force narrows it."""

    sizes: Mapping[int, int]
    narrowed: Mapping[int, tuple[int, int]]

    def of(self, v: int) -> tuple[int, int]:
        """Return the smallest and largest value of a variable."""
        return self.narrowed.get(v, (0, self.sizes[v] - 1))


def variable(v: int) -> Affine:
    """Return the index that is one variable."""
    return Affine(((v, 1),))


def limits(index: Affine, ranges: Ranges) -> tuple[int, int]:
    """Return the smallest and largest value an index takes."""
    low = high = index.constant
    for v, c in index.terms:
        first, last = ranges.of(v)
        low, high = low + min(c * first, c * last), high + max(c * first, c * last)
    return low, high


def flatten(index: Sequence[Affine], shape: Sequence[int]) -> Affine:
    """Return the row-major position of an index in a shape."""
    flat, stride = ZERO, 1
    for i, size in zip(reversed(index), reversed(shape), strict=True):
        flat = flat.plus(i.times(stride))
        stride *= size
    return flat


def divide(index: Affine, divisor: int, ranges: Ranges) -> tuple[Affine, Affine]:
    """Split an index into quotient and remainder.

    Raises:
        NeedSplit: A variable straddles the divisor and can be split at it.
        NotAffineError: It cannot.
    """
    quotient: list[tuple[int, int]] = []
    remainder: list[tuple[int, int]] = []
    for v, c in index.terms:
        if c % divisor == 0:
            quotient.append((v, c // divisor))
        elif ranges.sizes[v] > 1:
            remainder.append((v, c))
    q0, r0 = index.constant // divisor, index.constant % divisor
    rest = Affine(tuple(remainder), r0)
    low, high = limits(rest, ranges)
    if low >= 0 and high < divisor:
        return Affine(tuple(quotient), q0), rest
    for v, c in remainder:
        factor = divisor // c if 0 < c < divisor and divisor % c == 0 else 0
        if factor and ranges.sizes[v] % factor == 0 and 1 < factor < ranges.sizes[v]:
            raise NeedSplit(v, factor)
    raise NotAffineError(f"an index over {[ranges.sizes[v] for v, _ in index.terms]} does not divide by {divisor}")


def reshape(index: Sequence[Affine], shape: Sequence[int], source: Sequence[int], ranges: Ranges) -> tuple[Affine, ...]:
    """Return the index into `source` that holds the element at `index` of its reshape to `shape`.

    Dims are matched in the smallest groups of equal products, so a dim that the reshape leaves alone keeps its index.
    """
    if tuple(shape) == tuple(source):
        return tuple(index)
    if math.prod(shape) == 0:
        return (ZERO,) * len(source)
    result: list[Affine] = []
    at = 0
    for group in _groups(shape, source):
        new, old = group
        part = index[at : at + len(new)]
        at += len(new)
        result.extend(part if len(new) == len(old) == 1 else _unflatten(flatten(part, new), old, ranges))
    return tuple(result)


def _unflatten(flat: Affine, shape: Sequence[int], ranges: Ranges) -> list[Affine]:
    result = [ZERO] * len(shape)
    dims = [d for d, size in enumerate(shape) if size != 1]
    for d in dims[:0:-1]:
        flat, result[d] = divide(flat, shape[d], ranges)
    if dims:  # the outermost takes what is left: nothing to divide
        result[dims[0]] = flat
    return result


def _groups(shape: Sequence[int], source: Sequence[int]) -> list[tuple[list[int], list[int]]]:
    groups: list[tuple[list[int], list[int]]] = []
    i = j = 0
    while i < len(shape) or j < len(source):
        if i < len(shape) and j < len(source) and shape[i] == source[j]:
            groups.append(([shape[i]], [source[j]]))
            i, j = i + 1, j + 1
            continue
        if i < len(shape) and shape[i] == 1:
            groups.append(([1], []))
            i += 1
            continue
        if j < len(source) and source[j] == 1:
            groups.append(([], [1]))
            j += 1
            continue
        new, old = [shape[i]], [source[j]]
        i, j = i + 1, j + 1
        while math.prod(new) != math.prod(old):
            if math.prod(new) < math.prod(old):
                new.append(shape[i])
                i += 1
            else:
                old.append(source[j])
                j += 1
        groups.append((new, old))
    return groups
