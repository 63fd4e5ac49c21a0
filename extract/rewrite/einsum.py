"""Sums of products of two tensors, `einsum`, as the matmul that they are between permutations and reshapes.

Where nothing is summed (an outer product of positions and frequencies) they are a multiplication.

Runs before `spell`, which makes views of the reshapes where that is possible. A right factor without batches is taken
as a linear layer's weight: its columns first, then transposed by a view.
"""

from typing import NamedTuple

from tune_model.extract.algebra import same
from tune_model.extract.layout import make_type, size_args
from tune_model.extract.layout import view as view_of
from tune_model.extract.rewrite.graph import Graph
from tune_model.runtime.expression import Dim
from tune_model.runtime.expression import product as times
from tune_model.runtime.program import Call, Items, Program, Ref, TensorType

__all__ = ["spell_einsums"]

_SPARE = "ZYXWVUTSRQPONMLKJIHGFEDCBA"
"""Letters that stand for what an ellipsis stands for."""


class _Equation(NamedTuple):
    """Dims by letter, in each factor and the result."""

    left: str
    right: str
    result: str

    @property
    def batch(self) -> str:
        """In all three."""
        return "".join(c for c in self.result if c in self.left and c in self.right)

    @property
    def rows(self) -> str:
        """In the left factor and the result."""
        return "".join(c for c in self.result if c in self.left and c not in self.right)

    @property
    def columns(self) -> str:
        """In the right factor and the result."""
        return "".join(c for c in self.result if c in self.right and c not in self.left)

    @property
    def summed(self) -> str:
        """In both factors and not in the result."""
        return "".join(c for c in self.left if c in self.right and c not in self.result)

    @property
    def is_known(self) -> bool:
        """Every dim is one of these."""
        each_once = all(len(set(part)) == len(part) for part in self)
        everything = set(self.left) | set(self.right) | set(self.result)
        return each_once and everything == {*self.batch, *self.rows, *self.columns, *self.summed}


class _Product(NamedTuple):
    """An equation with its factors and the size of every letter."""

    equation: _Equation
    left: str
    right: str
    sizes: dict[str, Dim]


def spell_einsums(program: Program) -> Program:
    """Replace sums of products of two tensors of one type; others stay calls."""
    graph = Graph(program)
    for index, step in enumerate(graph.steps):
        if step.op == "aten.einsum.default" and step.results[0] is not None:
            product = _read(graph, step)
            if product is not None:
                writer = _Writer(graph, index, step.results[0], product)
                if product.equation.summed:
                    writer.write_matmul()
                else:
                    writer.write_multiplication()
    return graph.finish()


def _read(graph: Graph, step: Call) -> _Product | None:
    text, factors = step.args[:2]
    if not isinstance(text, str) or not isinstance(factors, Items) or len(factors.items) != 2:
        return None
    left, right = factors.items
    if not isinstance(left, Ref) or not isinstance(right, Ref):
        return None
    types = graph.type(left.name), graph.type(right.name)
    equation = _equation(text, len(types[0].shape), len(types[1].shape))
    if equation is None or not equation.is_known or types[0].dtype != types[1].dtype:
        return None
    sizes: dict[str, Dim] = {}
    for letters, type_ in zip(equation[:2], types, strict=True):
        for letter, size in zip(letters, type_.shape, strict=True):
            if not same(sizes.setdefault(letter, size), size):
                return None  # a size of 1 that is broadcast
    return _Product(equation, left.name, right.name, sizes)


def _equation(text: str, *ranks: int) -> _Equation | None:
    """Read an equation that says its result; an ellipsis stands for as many dims in each factor."""
    given, arrow, result = text.replace(" ", "").partition("->")
    factors = given.split(",")
    if not arrow or len(factors) != 2:
        return None
    hidden = {rank - len(f.replace("...", "")) for f, rank in zip(factors, ranks, strict=True) if "..." in f}
    if len(hidden) > 1:
        return None
    dims = _SPARE[: hidden.pop()] if hidden else ""
    if any(letter in text for letter in dims):
        return None
    left, right = (factor.replace("...", dims) for factor in factors)
    found = _Equation(left, right, result.replace("...", dims))
    return found if (len(left), len(right)) == ranks and "".join(found).isalpha() else None


class _Writer:
    """Writes one equation as calls before its step."""

    def __init__(self, graph: Graph, index: int, result: str, product: _Product) -> None:
        self.graph = graph
        self.index = index
        self.result = result
        self.product = product

    def write_matmul(self) -> None:
        e, left, right, sizes = self.product
        batch = [sizes[c] for c in e.batch]
        if batch:
            a = self._reshaped(self._ordered(left, e.left, e.batch + e.rows + e.summed), [*e.batch, e.rows, e.summed])
            b = self._reshaped(
                self._ordered(right, e.right, e.batch + e.summed + e.columns), [*e.batch, e.summed, e.columns]
            )
            shape = (*batch, self._size(e.rows), self._size(e.columns))
        else:
            a = self._reshaped(self._ordered(left, e.left, e.rows + e.summed), [*(e.rows or [""]), e.summed])
            turned = self._reshaped(self._ordered(right, e.right, e.columns + e.summed), [e.columns, e.summed])
            b = self._ordered(turned, "cs", "sc")
            shape = (*(sizes[c] for c in e.rows), self._size(e.columns)) if e.rows else (1, self._size(e.columns))
        type_ = make_type(self.graph.type(left).dtype, shape)
        made = self._add(Call("aten.matmul.default", (Ref(a), Ref(b))), type_)
        whole = self._reshaped(made, [*e.batch, *e.rows, *e.columns])
        self.graph.replace(self.result, self._ordered(whole, e.batch + e.rows + e.columns, e.result))

    def write_multiplication(self) -> None:
        e, left, right, sizes = self.product
        factors = []
        for name, letters in ((left, e.left), (right, e.right)):
            ordered = self._ordered(name, letters, "".join(c for c in e.result if c in letters))
            factors.append(Ref(self._reshaped(ordered, [c if c in letters else "" for c in e.result])))
        type_ = make_type(self.graph.type(left).dtype, tuple(sizes[c] for c in e.result))
        self.graph.replace(self.result, self._add(Call("aten.mul.Tensor", tuple(factors)), type_))

    def _size(self, letters: str) -> Dim:
        return times(tuple(self.product.sizes[c] for c in letters))

    def _add(self, call: Call, type_: TensorType) -> str:
        return self.graph.add(self.index, call, type_, self.result)

    def _ordered(self, name: str, letters: str, wanted: str) -> str:
        """Permute dims from one order of letters to another."""
        if letters == wanted:
            return name
        call = Call("aten.permute.default", (Ref(name), Items(tuple(letters.index(c) for c in wanted))))
        found = view_of(call, self.graph.type(name))
        if found is None:
            raise ValueError("a permutation is always a view")
        return self._add(call, found.type)

    def _reshaped(self, name: str, groups: list[str]) -> str:
        """Make one dim of each group of letters; of an empty one a dim of size 1."""
        before = self.graph.type(name)
        type_ = make_type(before.dtype, tuple(self._size(group) for group in groups))
        if len(before.shape) == len(groups) and all(same(a, b) for a, b in zip(before.shape, type_.shape, strict=True)):
            return name
        return self._add(Call("aten.reshape.default", (Ref(name), size_args(type_.shape))), type_)
