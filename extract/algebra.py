"""Exact algebra on sizes: is `batch*sequence*4096` the same as `(sequence*4096)*batch`, and what is it over `sequence`?

Sizes become polynomials with integer coefficients; what is no polynomial (`//`, `%`, `min`, ...) is one opaque factor.
"""

import math
from collections.abc import Iterable
from functools import lru_cache

from tune_model.runtime.expression import Dim, fold

__all__ = ["Polynomial", "polynomial", "same", "same_all", "tidy"]

Term = tuple[str, ...]


class Polynomial:
    """An immutable polynomial over symbols; equal polynomials compare and hash equal."""

    __slots__ = ("_hash", "terms")

    def __init__(self, terms: dict[Term, int]) -> None:
        self.terms: tuple[tuple[Term, int], ...] = tuple(sorted((t, c) for t, c in terms.items() if c))
        self._hash = hash(self.terms)

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Polynomial) and self.terms == other.terms

    def __repr__(self) -> str:
        return f"Polynomial({self.dim!r})"

    def __add__(self, other: "Polynomial") -> "Polynomial":
        terms = dict(self.terms)
        for term, coefficient in other.terms:
            terms[term] = terms.get(term, 0) + coefficient
        return Polynomial(terms)

    def __sub__(self, other: "Polynomial") -> "Polynomial":
        return self + other * Polynomial({(): -1})

    def __mul__(self, other: "Polynomial") -> "Polynomial":
        return _product(self, other)

    def times(self, other: "Polynomial") -> "Polynomial":
        """Multiply, without looking whether that was done before."""
        terms: dict[Term, int] = {}
        for a, ca in self.terms:
            for b, cb in other.terms:
                key = tuple(sorted(a + b))
                terms[key] = terms.get(key, 0) + ca * cb
        return Polynomial(terms)

    def over(self, other: "Polynomial") -> "Polynomial | None":
        """Return the exact quotient, or `None` when `other` does not divide this for every value of the symbols.

        Complete for divisors of one term; for longer ones only a quotient of one term is found.
        """
        if not other.terms:
            return None
        if not self.terms:
            return self
        if len(other.terms) == 1:
            quotients = [_divide_term(t, other.terms[0]) for t in self.terms]
            known = [q for q in quotients if q is not None]
            return Polynomial(dict(known)) if len(known) == len(quotients) else None
        # Adding factors keeps the terms' order, so the first terms divide if anything does.
        for mine in self.terms:
            quotient = _divide_term(mine, other.terms[0])
            if quotient is not None and (found := Polynomial(dict([quotient]))) * other == self:
                return found
        return None

    @property
    def constant(self) -> int | None:
        """The value, if no symbol is in it."""
        if not self.terms:
            return 0
        return self.terms[0][1] if len(self.terms) == 1 and self.terms[0][0] == () else None

    @property
    def content(self) -> int:
        """The greatest integer that divides it for every value of the symbols."""
        return math.gcd(*(c for _, c in self.terms))

    @property
    def dim(self) -> Dim:
        """The canonical text: symbols before numbers, terms in order."""
        constant = self.constant
        if constant is not None:
            return constant
        text = ""
        for term, coefficient in reversed(self.terms):
            factors = [*term, *([str(abs(coefficient))] if abs(coefficient) != 1 or not term else [])]
            sign = "-" if coefficient < 0 else "+"
            text += (f" {sign} " if text else "-" * (coefficient < 0)) + "*".join(factors)
        return text


@lru_cache(maxsize=65536)
def _product(a: Polynomial, b: Polynomial) -> Polynomial:
    return a.times(b)


def _divide_term(a: tuple[Term, int], b: tuple[Term, int]) -> tuple[Term, int] | None:
    if a[1] % b[1]:
        return None
    rest = list(a[0])
    for factor in b[0]:
        if factor not in rest:
            return None
        rest.remove(factor)
    return tuple(rest), a[1] // b[1]


def _leaf(dim: Dim) -> Polynomial:
    return Polynomial({(): dim}) if isinstance(dim, int) else Polynomial({(dim,): 1})


def _combine(operator: str, operands: list[Polynomial]) -> Polynomial:
    match operator:
        case "neg":
            return operands[0] * _leaf(-1)
        case "+":
            return operands[0] + operands[1]
        case "-":
            return operands[0] - operands[1]
        case "*":
            return operands[0] * operands[1]
        case "min" | "max":
            return _extreme(operator, operands)
        case _:
            return _divided(operator, *operands)


def _extreme(operator: str, operands: list[Polynomial]) -> Polynomial:
    known = [v for p in operands if (v := p.constant) is not None]
    if len(known) == len(operands):
        return _leaf((min if operator == "min" else max)(known))
    return _leaf(f"{operator}({', '.join(sorted(str(p.dim) for p in operands))})")


def _divided(operator: str, a: Polynomial, b: Polynomial) -> Polynomial:
    exact = a.over(b)
    if exact is not None:
        return exact if operator != "%" else _leaf(0)
    x, y = a.constant, b.constant
    if x is not None and y:
        return _leaf({"//": x // y, "%": x % y, "cdiv": -(-x // y)}[operator])
    return _leaf(f"cdiv({a.dim}, {b.dim})" if operator == "cdiv" else f"(({a.dim}) {operator} ({b.dim}))")


@lru_cache(maxsize=65536)
def polynomial(dim: Dim) -> Polynomial:
    """Return a size as a polynomial."""
    return fold(dim, _leaf, _combine)


def same(a: Dim, b: Dim) -> bool:
    """Say whether two sizes are equal for every value of their symbols."""
    return a == b or (not (isinstance(a, int) and isinstance(b, int)) and polynomial(a) == polynomial(b))


def same_all(a: Iterable[Dim], b: Iterable[Dim]) -> bool:
    """Say whether two lists of sizes are equal, element by element."""
    left, right = tuple(a), tuple(b)
    return len(left) == len(right) and all(same(x, y) for x, y in zip(left, right, strict=True))


def tidy(dim: Dim) -> Dim:
    """Return the canonical text of a size."""
    return dim if isinstance(dim, int) else polynomial(dim).dim
