"""Canonical names and order: emitted calls become a `Form`, byte-equal for equal regions.

Values are ordered by a structural hash (what they compute from what, and who reads them), never by the order or the
names of the trace. Operands of commutative calls follow that order, calls are emitted depth first from the results, and
parameters, values and dims are numbered as they appear.
"""

import hashlib
from collections.abc import Mapping
from typing import NamedTuple

from tune_model.extract.algebra import Polynomial, polynomial
from tune_model.extract.layout import make_type
from tune_model.extract.regions.region import Operand
from tune_model.extract.regions.vocabulary import COMMUTATIVE
from tune_model.extract.rewrite.graph import refs
from tune_model.runtime.expression import Dim
from tune_model.runtime.program import (
    Arg,
    Call,
    Form,
    FormKind,
    Items,
    Parameter,
    Ref,
    Size,
    TensorType,
    ValueRange,
)

__all__ = ["Canonical", "Emitted", "name_form"]


class Emitted(NamedTuple):
    """A region's calls over its loops, before naming.

    Attributes:
        kind: Of the form.
        calls: In an order that runs.
        operands: Parameters, named as in `calls`.
        results: Values that are results.
        types: Of operands and results, over the program's symbols.
        ordered: Keep the calls' order (they write in place).
    """

    kind: FormKind
    calls: tuple[Call, ...]
    operands: tuple[Operand, ...]
    results: tuple[str, ...]
    types: Mapping[str, TensorType]
    ordered: bool = False


class Canonical(NamedTuple):
    """A form and how the region it came from fits it.

    Attributes:
        form: Canonical.
        operands: Which of the region's operands each parameter is.
        results: Which of the region's results each result is.
        dims: What each of the form's dims is, over the program's symbols.
    """

    form: Form
    operands: tuple[int, ...]
    results: tuple[int, ...]
    dims: tuple[Dim, ...]


def _digest(*parts: object) -> str:
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]


def is_commutative(call: Call) -> bool:
    """Say whether the first two operands may be swapped."""
    return call.op in COMMUTATIVE and len(call.args) == 2 and not call.kwargs


class _Colours:
    """Structural hashes of values: from what they are made of, then also from who reads them."""

    def __init__(self, emitted: Emitted) -> None:
        self.emitted = emitted
        self.colour: dict[str, str] = {}
        start = {
            o.name: _digest(self._type(emitted.types[o.name]), o.role, self._range(o.values)) for o in emitted.operands
        }
        self._from_operands(start)
        for _ in range(2):
            context = self._context()
            self._from_operands({n: _digest(c, context.get(n)) for n, c in start.items()})

    def _size(self, dim: Dim) -> object:
        """Symbolic sizes are told apart by being equal or not, never by name."""
        value = polynomial(dim)
        return value.constant if value.constant is not None else ("symbolic", value.content)

    def _type(self, type_: TensorType) -> object:
        strides = None if type_.strides is None else tuple(self._size(s) for s in type_.strides)
        return type_.dtype, tuple(self._size(s) for s in type_.shape), strides

    def _range(self, values: ValueRange | None) -> object:
        return None if values is None else (self._size(values.low), self._size(values.high))

    def _argument(self, arg: Arg) -> object:
        match arg:
            case Ref(name):
                return "value", self.colour[name]
            case Items(items):
                return tuple(self._argument(a) for a in items)
            case Size(expression):
                return self._size(expression)
            case _:
                return type(arg).__name__, repr(arg)

    def _from_operands(self, start: Mapping[str, str]) -> None:
        self.colour = dict(start)
        for call in self.emitted.calls:
            arguments = [self._argument(a) for a in call.args]
            if is_commutative(call):
                arguments.sort(key=repr)
            colour = _digest(call.op, arguments, [(k, self._argument(a)) for k, a in call.kwargs])
            for result in call.results:
                if result is not None:
                    self.colour[result] = colour

    def _context(self) -> dict[str, str]:
        """Hash who reads each value, as which argument, and what becomes of the reader."""
        after: dict[str, list[object]] = {}
        for name in self.emitted.results:
            after.setdefault(name, []).append("result")
        for call in reversed(self.emitted.calls):
            made = [(self.colour[r], sorted(map(repr, after.get(r, [])))) for r in call.results if r is not None]
            seen = _digest(call.op, made)
            for position, name in enumerate(refs(call)):
                after.setdefault(name, []).append((seen, 0 if is_commutative(call) else position))
        return {name: _digest(sorted(map(repr, readers))) for name, readers in after.items()}


class _Namer:
    """Numbers everything in order of appearance."""

    def __init__(self, emitted: Emitted) -> None:
        self.emitted = emitted
        self.colours = _Colours(emitted).colour
        self.makers = {r: c for c in emitted.calls for r in c.results if r is not None}
        self.names: dict[str, str] = {}
        self.body: list[Call] = []
        self.parameters: list[str] = []
        self.dims: list[Polynomial] = []

    def run(self) -> Canonical:
        results = sorted(self.emitted.results, key=lambda n: self.colours[n])
        if self.emitted.ordered:
            results = list(self.emitted.results)
            for call in self.emitted.calls:
                self._call(call)
        for name in results:
            self._visit(name)
        by_name = {o.name: o for o in self.emitted.operands}
        operands = [by_name[n] for n in self.parameters]
        for name in (*self.parameters, *results):
            for size in self.emitted.types[name].shape:
                self._declare(size)
        types = {n: self._type(self.emitted.types[n]) for n in (*self.parameters, *results)}
        body = tuple(Call(c.op, tuple(map(self._arg, c.args)), c.kwargs, c.results) for c in self.body)
        parameters = tuple(
            Parameter(self.names[o.name], types[o.name], o.role, self._range(o.values)) for o in operands
        )
        form = Form(
            kind=self.emitted.kind,
            dims=tuple(f"d{i}" for i in range(len(self.dims))),
            parameters=parameters,
            body=body,
            results=tuple(Parameter(self.names[n], types[n]) for n in results),
        )
        order = [o.name for o in self.emitted.operands]
        return Canonical(
            form,
            tuple(order.index(n) for n in self.parameters),
            tuple(self.emitted.results.index(n) for n in results),
            tuple(d.dim for d in self.dims),
        )

    # ---------------------------------------------------------------------------------------------------------- values

    def _visit(self, name: str) -> None:
        if name in self.names:
            return
        call = self.makers.get(name)
        if call is None:
            self.names[name] = f"a{len(self.parameters)}"
            self.parameters.append(name)
            return
        self._call(call)

    def _call(self, call: Call) -> None:
        if is_commutative(call):
            # What the region computes comes before what it reads, so that a matmul's operands are a0, a1, ...
            ranked = sorted(call.args, key=lambda a: (self._is_operand(a), self._colour(a)))
            call = Call(call.op, tuple(ranked), call.kwargs, call.results)
        for name in refs(call):
            self._visit(name)
        results = []
        for result in call.results:
            if result is not None:
                self.names[result] = f"t{sum(n.startswith('t') for n in self.names.values())}"
            results.append(None if result is None else self.names[result])
        renamed = tuple(self._renamed(a) for a in call.args)
        keywords = tuple((k, self._renamed(a)) for k, a in call.kwargs)
        self.body.append(Call(call.op, renamed, keywords, tuple(results)))

    def _is_operand(self, arg: Arg) -> bool:
        return isinstance(arg, Ref) and arg.name not in self.makers

    def _colour(self, arg: Arg) -> str:
        return self.colours[arg.name] if isinstance(arg, Ref) else ""

    def _renamed(self, arg: Arg) -> Arg:
        if isinstance(arg, Ref):
            return Ref(self.names[arg.name])
        return Items(tuple(self._renamed(a) for a in arg.items)) if isinstance(arg, Items) else arg

    # ----------------------------------------------------------------------------------------------------------- sizes

    def _declare(self, dim: Dim) -> None:
        value = polynomial(dim)
        if value.constant is None and value not in self.dims:
            self.dims.append(value)

    def _express(self, value: Polynomial) -> Polynomial:
        """Return a size over the form's dims; a symbol that none of them holds becomes one more dim."""
        if value.constant is not None:
            return value
        if value in self.dims:
            return polynomial(f"d{self.dims.index(value)}")
        for i, dim in enumerate(self.dims):
            rest = value.over(dim)
            if rest is not None:
                return self._express(rest) * polynomial(f"d{i}")
        if len(value.terms) > 1:
            parts = [self._express(Polynomial(dict([t]))) for t in value.terms]
            return sum(parts[1:], start=parts[0])
        self.dims.append(polynomial(value.terms[0][0][0]))
        return self._express(value)

    def _dim(self, dim: Dim) -> Dim:
        return self._express(polynomial(dim)).dim

    def _type(self, type_: TensorType) -> TensorType:
        strides = None if type_.strides is None else tuple(self._dim(s) for s in type_.strides)
        return make_type(type_.dtype, tuple(self._dim(s) for s in type_.shape), strides)

    def _range(self, values: ValueRange | None) -> ValueRange | None:
        return None if values is None else ValueRange(self._dim(values.low), self._dim(values.high))

    def _arg(self, arg: Arg) -> Arg:
        if isinstance(arg, Size):
            dim = self._dim(arg.expression)
            return Size(dim) if isinstance(dim, str) else dim
        return Items(tuple(self._arg(a) for a in arg.items)) if isinstance(arg, Items) else arg


def name_form(emitted: Emitted) -> Canonical:
    """Return the canonical form of emitted calls."""
    return _Namer(emitted).run()
