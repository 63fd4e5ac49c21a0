"""Complex numbers as pairs of real ones, so that a rotary embedding written with them is pointwise work like any other.

Models turn neighbouring features into complex numbers and multiply them by `polar(1, angle)`, or by a table of such
numbers. Kernels know real numbers only, and a view as complex numbers would have to follow its source's layout. All
complex values that a program computes are taken apart, or none: one that the caller gets, or that anything else reads,
leaves the program as it is. Weights, constants and inputs stay complex and are viewed as real numbers where they are
read.
"""

from collections.abc import Callable
from typing import NamedTuple

from tune_model.extract.algebra import polynomial
from tune_model.extract.layout import VIEWS, make_type, size_args, strides_of
from tune_model.extract.rewrite.graph import READ_BY_CALLER, Graph, refs
from tune_model.extract.rewrite.relayout import relayout
from tune_model.extract.rewrite.viewing import add_view
from tune_model.runtime.expression import Dim
from tune_model.runtime.program import Arg, Call, Items, Program, Ref

__all__ = ["take_complex_numbers_apart"]

_REAL = {"complex64": "float32", "complex128": "float64"}


class _Pair(NamedTuple):
    """The values that hold a complex value's parts."""

    real: str
    imaginary: str


def take_complex_numbers_apart(program: Program) -> Program:
    """Replace arithmetic on complex values by arithmetic on their parts; the same roundings, in another order."""
    graph = Graph(program)
    complex_steps = [i for i, step in enumerate(graph.steps) if _touches_complex(graph, step)]
    if not complex_steps or not all(_is_known(graph, graph.steps[i]) for i in complex_steps):
        return program
    apart = _Parts(graph)
    for index in complex_steps:
        apart.take(index)
    return relayout(graph.finish())


def _is_complex(graph: Graph, name: str) -> bool:
    return graph.type(name).dtype in _REAL


def _touches_complex(graph: Graph, step: Call) -> bool:
    return any(_is_complex(graph, name) for name in (*refs(step), *(r for r in step.results if r is not None)))


def _is_known(graph: Graph, step: Call) -> bool:
    result = step.results[0] if len(step.results) == 1 else None
    if result is None or (step.op not in _RULES and step.op not in VIEWS) or step.kwargs:
        return False
    return not _is_complex(graph, result) or READ_BY_CALLER not in graph.readers.get(result, ())


class _Parts:
    """The parts of every complex value made so far."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.pairs: dict[str, _Pair] = {}
        self.index = 0
        self.step = graph.steps[0]

    def take(self, index: int) -> None:
        """Take one step's result apart."""
        self.index, self.step = index, self.graph.steps[index]
        if self.step.op in VIEWS:
            self._view()
        else:
            _RULES[self.step.op](self)

    @property
    def result(self) -> str:
        return str(self.step.results[0])

    def operand(self, at: int) -> str:
        arg = self.step.args[at]
        if not isinstance(arg, Ref):
            raise TypeError(f"{self.step.op} takes {arg!r}; expected a tensor")
        return arg.name

    def pair(self, name: str) -> _Pair | None:
        """Return a complex value's parts, of one that nothing here computed as views; `None` of a real value."""
        if name not in self.pairs and _is_complex(self.graph, name):
            self.pairs[name] = self._outside(name)
        return self.pairs.get(name)

    def parts(self, at: int) -> _Pair:
        """Return the parts of an operand that is complex."""
        pair = self.pair(self.operand(at))
        if pair is None:
            raise TypeError(f"{self.step.op} takes {self.operand(at)}, which is real; expected complex numbers")
        return pair

    def _outside(self, name: str) -> _Pair:
        type_ = self.graph.type(name)
        strides = (*((polynomial(stride) * polynomial(2)).dim for stride in strides_of(type_)), 1)
        real = make_type(_REAL[type_.dtype], (*type_.shape, 2), strides)
        return self._columns(self.graph.add(self.index, Call("aten.view_as_real.default", (Ref(name),)), real, name))

    def _columns(self, source: str) -> _Pair:
        """See the two columns of a last dim as values of the other dims."""
        shape = self.graph.type(source).shape
        columns = [self.seen("aten.slice.Tensor", source, len(shape) - 1, start, start + 1) for start in (0, 1)]
        return _Pair(*(self.seen("aten.view.default", column, size_args(shape[:-1])) for column in columns))

    def put(self, op: str, *args: Arg, shape: tuple[Dim, ...] | None = None) -> str:
        """Add a step over real tensors; its result has the shape of the step's own unless said."""
        type_ = self.graph.type(self.result)
        made = make_type(_REAL.get(type_.dtype, type_.dtype), type_.shape if shape is None else shape)
        return self.graph.add(self.index, Call(op, args), made, self.result)

    def seen(self, op: str, source: str, *args: Arg) -> str:
        """Add a view of `source`."""
        return add_view(self.graph, self.index, op, source, *args)

    def _view(self) -> None:
        pair = self.parts(0)
        rest = self.step.args[1:]
        self.pairs[self.result] = _Pair(*(self.seen(self.step.op, part, *rest) for part in pair))

    # ---------------------------------------------------------------------------------------------------------- making

    def polar(self) -> None:
        """Radius and angle: nothing is multiplied by a radius of ones."""
        radius, angle = self.operand(0), self.operand(1)
        parts = [self.put(op, Ref(angle)) for op in ("aten.cos.default", "aten.sin.default")]
        if self.graph.made_by(Ref(radius), "aten.ones_like.default") is None:
            parts = [self.put("aten.mul.Tensor", Ref(radius), Ref(part)) for part in parts]
        self.pairs[self.result] = _Pair(*parts)

    def joined(self) -> None:
        self.pairs[self.result] = _Pair(self.operand(0), self.operand(1))

    def paired(self) -> None:
        """`view_as_complex`: the two columns of the last dim."""
        self.pairs[self.result] = self._columns(self.operand(0))

    # ------------------------------------------------------------------------------------------------------- computing

    def product(self) -> None:
        a, b = self.pair(self.operand(0)), self.pair(self.operand(1))
        if a is not None and b is not None:
            self.pairs[self.result] = self._both(a, b)
            return
        pair, factor = (self.parts(1), self.operand(0)) if a is None else (a, self.operand(1))
        self.pairs[self.result] = _Pair(*(self.put("aten.mul.Tensor", Ref(part), Ref(factor)) for part in pair))

    def _both(self, a: _Pair, b: _Pair) -> _Pair:
        def times(x: str, y: str) -> Ref:
            return Ref(self.put("aten.mul.Tensor", Ref(x), Ref(y)))

        real = self.put("aten.sub.Tensor", times(a.real, b.real), times(a.imaginary, b.imaginary))
        imaginary = self.put("aten.add.Tensor", times(a.real, b.imaginary), times(a.imaginary, b.real))
        return _Pair(real, imaginary)

    def scaled(self) -> None:
        pair, number = self.parts(0), self.step.args[1]
        self.pairs[self.result] = _Pair(*(self.put("aten.mul.Scalar", Ref(part), number) for part in pair))

    # --------------------------------------------------------------------------------------------------------- reading

    def unpaired(self) -> None:
        """`view_as_real`: both parts side by side in a last dim of two."""
        pair = self.parts(0)
        shape = self.graph.type(self.result).shape
        columns = [self.seen("aten.view.default", part, size_args((*shape[:-1], 1))) for part in pair]
        joined = self.put("aten.cat.default", Items(tuple(Ref(column) for column in columns)), len(shape) - 1)
        self.graph.replace(self.result, joined)

    def real(self) -> None:
        self.graph.replace(self.result, self.parts(0).real)

    def imaginary(self) -> None:
        self.graph.replace(self.result, self.parts(0).imaginary)


_RULES: dict[str, Callable[[_Parts], None]] = {
    "aten.polar.default": _Parts.polar,
    "aten.complex.default": _Parts.joined,
    "aten.view_as_complex.default": _Parts.paired,
    "aten.mul.Tensor": _Parts.product,
    "aten.mul.Scalar": _Parts.scaled,
    "aten.view_as_real.default": _Parts.unpaired,
    "aten.real.default": _Parts.real,
    "aten.imag.default": _Parts.imaginary,
}
