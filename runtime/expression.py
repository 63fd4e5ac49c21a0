"""Symbolic integers: sizes, strides, grids and kernel arguments as short arithmetic texts.

Grammar: integers, names (`s0`, `a1.size0`), `+ - * // %`, unary minus, parentheses and the functions `cdiv(a, b)`,
`min(...)`, `max(...)`. A text is parsed into a tree and walked; nothing is ever handed to `eval`.
"""

import math
import re
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import NamedTuple, TypeVar

from tune_model.runtime.errors import TuneModelError

__all__ = ["Dim", "ExpressionError", "evaluate", "fold", "product", "rename", "symbols"]

_T = TypeVar("_T")

Dim = int | str
"""A size that is known (`4096`) or an expression over symbols (`"s0*s1"`)."""

MAX_LENGTH = 2048
MAX_TOKENS = 256
"""A chain of operators makes a tree as deep as it is long, and trees are walked recursively."""

MAX_DEPTH = 64

_TOKEN = re.compile(r"\s*(?:(\d+)|([A-Za-z_][A-Za-z0-9_]*(?:\.[A-Za-z0-9_]+)*)|(//|[-+*%(),]))")


class ExpressionError(TuneModelError):
    """A symbolic size could not be parsed or evaluated."""


class _Number(NamedTuple):
    value: int


class _Name(NamedTuple):
    name: str


class _Apply(NamedTuple):
    function: str
    arguments: tuple["_Node", ...]


_Node = _Number | _Name | _Apply


def _divide(a: int, b: int) -> int:
    if b == 0:
        raise ExpressionError("division by zero in a symbolic size")
    return a // b


def _modulo(a: int, b: int) -> int:
    if b == 0:
        raise ExpressionError("modulo by zero in a symbolic size")
    return a % b


_FUNCTIONS: dict[str, tuple[int | None, Callable[..., int]]] = {
    "+": (2, lambda a, b: a + b),
    "-": (2, lambda a, b: a - b),
    "*": (2, lambda a, b: a * b),
    "//": (2, _divide),
    "%": (2, _modulo),
    "neg": (1, lambda a: -a),
    "cdiv": (2, lambda a, b: -_divide(-a, b)),
    "min": (None, min),
    "max": (None, max),
}


class _Parser:
    """Recursive descent over the tokens of one text."""

    def __init__(self, text: str) -> None:
        if len(text) > MAX_LENGTH:
            raise ExpressionError(f"symbolic size of {len(text)} characters; expected at most {MAX_LENGTH}")
        self.text = text
        self.tokens: list[str] = []
        self.position = 0
        at = 0
        stripped = text.rstrip()
        while at < len(stripped):
            match = _TOKEN.match(stripped, at)
            if match is None:
                raise ExpressionError(f"symbolic size {text!r} has an unexpected character at {at}")
            self.tokens.append(match.group(match.lastindex or 0))
            at = match.end()
        if len(self.tokens) > MAX_TOKENS:
            raise ExpressionError(f"symbolic size of {len(self.tokens)} tokens; expected at most {MAX_TOKENS}")

    def parse(self) -> _Node:
        node = self._sum(0)
        if self.position != len(self.tokens):
            raise ExpressionError(f"symbolic size {self.text!r} has {self.tokens[self.position]!r} too much")
        return node

    def _peek(self) -> str:
        return self.tokens[self.position] if self.position < len(self.tokens) else ""

    def _take(self, expected: str = "") -> str:
        token = self._peek()
        if not token or (expected and token != expected):
            raise ExpressionError(
                f"symbolic size {self.text!r} has {token or 'its end'!r}; expected {expected or 'a term'!r}"
            )
        self.position += 1
        return token

    def _sum(self, depth: int) -> _Node:
        if depth > MAX_DEPTH:
            raise ExpressionError(f"symbolic size nested deeper than {MAX_DEPTH}")
        node = self._product(depth)
        while self._peek() in {"+", "-"}:
            node = _Apply(self._take(), (node, self._product(depth)))
        return node

    def _product(self, depth: int) -> _Node:
        node = self._unary(depth)
        while self._peek() in {"*", "//", "%"}:
            node = _Apply(self._take(), (node, self._unary(depth)))
        return node

    def _unary(self, depth: int) -> _Node:
        if self._peek() == "-":
            self._take()
            if depth > MAX_DEPTH:
                raise ExpressionError(f"symbolic size nested deeper than {MAX_DEPTH}")
            return _Apply("neg", (self._unary(depth + 1),))
        return self._atom(depth)

    def _atom(self, depth: int) -> _Node:
        token = self._take()
        if token.isdigit():
            return _Number(int(token))
        if token == "(":
            node = self._sum(depth + 1)
            self._take(")")
            return node
        if not (token[0].isalpha() or token[0] == "_"):
            raise ExpressionError(f"symbolic size {self.text!r} has {token!r}; expected a term")
        if self._peek() != "(":
            return _Name(token)
        return self._call(token, depth)

    def _call(self, function: str, depth: int) -> _Node:
        if function not in {"cdiv", "min", "max"}:
            raise ExpressionError(f"symbolic size {self.text!r} calls {function!r}; expected cdiv, min or max")
        self._take("(")
        arguments = [self._sum(depth + 1)]
        while self._peek() == ",":
            self._take()
            arguments.append(self._sum(depth + 1))
        self._take(")")
        arity = _FUNCTIONS[function][0]
        if arity is not None and arity != len(arguments):
            raise ExpressionError(f"{function} takes {arity} arguments, got {len(arguments)} in {self.text!r}")
        return _Apply(function, tuple(arguments))


@lru_cache(maxsize=16384)
def _parse(text: str) -> _Node:
    return _Parser(text).parse()


def _walk(node: _Node, values: Mapping[str, int], text: str) -> int:
    if isinstance(node, _Number):
        return node.value
    if isinstance(node, _Name):
        value = values.get(node.name)
        if value is None:
            raise ExpressionError(f"symbolic size {text!r} needs {node.name!r}; known: {sorted(values)[:20]}")
        return value
    return _FUNCTIONS[node.function][1](*(_walk(a, values, text) for a in node.arguments))


def evaluate(dim: Dim, values: Mapping[str, int]) -> int:
    """Evaluate a size.

    Args:
        dim: An integer, returned as is, or an expression text.
        values: What each symbol stands for.

    Raises:
        ExpressionError: The text is malformed, names an unknown symbol or divides by zero.
    """
    return dim if isinstance(dim, int) else _walk(_parse(dim), values, dim)


def _names(node: _Node) -> set[str]:
    if isinstance(node, _Name):
        return {node.name}
    if isinstance(node, _Apply):
        return set().union(*(_names(a) for a in node.arguments))
    return set()


def symbols(dim: Dim) -> frozenset[str]:
    """Return the names a size depends on; empty for a known one."""
    return frozenset() if isinstance(dim, int) else frozenset(_names(_parse(dim)))


def _print(node: _Node, mapping: Mapping[str, Dim]) -> str:
    if isinstance(node, _Number):
        return str(node.value)
    if isinstance(node, _Name):
        to = mapping.get(node.name, node.name)
        return to if isinstance(to, str) and to.isidentifier() else f"({to})"
    arguments = [_print(a, mapping) for a in node.arguments]
    if node.function == "neg":
        return f"(-{arguments[0]})"
    if node.function in {"cdiv", "min", "max"}:
        return f"{node.function}({', '.join(arguments)})"
    return f"({arguments[0]} {node.function} {arguments[1]})"


def rename(dim: Dim, mapping: Mapping[str, Dim]) -> Dim:
    """Substitute symbols by other symbols, expressions or integers; folds to an integer when nothing stays symbolic."""
    if isinstance(dim, int):
        return dim
    text = _print(_parse(dim), mapping)
    return text if symbols(text) else evaluate(text, {})


def product(dims: tuple[Dim, ...]) -> Dim:
    """Multiply sizes, symbolically where one is symbolic."""
    known = math.prod(d for d in dims if isinstance(d, int))
    symbolic = [d if d.isidentifier() else f"({d})" for d in dims if isinstance(d, str)]
    if not symbolic or known == 0:
        return known
    return "*".join(symbolic) if known == 1 else "*".join([*symbolic, str(known)])


def _fold(node: _Node, leaf: Callable[[Dim], _T], combine: Callable[[str, list[_T]], _T]) -> _T:
    if isinstance(node, _Number):
        return leaf(node.value)
    if isinstance(node, _Name):
        return leaf(node.name)
    return combine(node.function, [_fold(a, leaf, combine) for a in node.arguments])


def fold(dim: Dim, leaf: Callable[[Dim], _T], combine: Callable[[str, list[_T]], _T]) -> _T:
    """Walk a size bottom up, for algebra on sizes.

    Args:
        dim: The size.
        leaf: Gets every integer and every symbol.
        combine: Gets an operator (`+ - * // % neg cdiv min max`) and what its operands became.
    """
    return leaf(dim) if isinstance(dim, int) else _fold(_parse(dim), leaf, combine)
