import pytest
import sympy
from sympy import Symbol
from torch.utils._sympy import functions as f

from tune_model.extract.sizes import SizePrinter, is_row_major
from tune_model.extract.tracing.front_end import TraceError
from tune_model.runtime.expression import evaluate

S, T = Symbol("s7", integer=True, positive=True), Symbol("s9", integer=True, positive=True)
VALUES = ({"batch": 3, "sequence": 7}, {"batch": 8, "sequence": 1}, {"batch": 5, "sequence": 16})


def printed(expression: sympy.Expr) -> int | str:
    names = {S: "batch", T: "sequence"}
    printer = SizePrinter(names)
    inside = {symbol: Symbol(name, integer=True, positive=True) for symbol, name in names.items()}
    return printer.print_expression(sympy.sympify(expression).xreplace(inside))


@pytest.mark.parametrize(
    ("expression", "meaning"),
    [
        (sympy.Integer(12), lambda s, t: 12),
        (S, lambda s, t: s),
        (4 * S * T + 3, lambda s, t: 4 * s * t + 3),
        (S - T, lambda s, t: s - t),
        (-2 * S + 100, lambda s, t: 100 - 2 * s),
        ((S + T) * (S + 1), lambda s, t: (s + t) * (s + 1)),
        (S**2 * T, lambda s, t: s * s * t),
        (f.FloorDiv(S + 5, 3), lambda s, t: (s + 5) // 3),
        (4 * f.FloorDiv(S, 3), lambda s, t: 4 * (s // 3)),
        (f.FloorDiv(4 * S, T), lambda s, t: 4 * s // t),
        (f.FloorDiv(f.FloorDiv(S * T, 2), 3), lambda s, t: s * t // 2 // 3),
        (f.Mod(S * T, T + 1), lambda s, t: s * t % (t + 1)),
        (f.PythonMod(S - 10, 4), lambda s, t: (s - 10) % 4),
        (f.CeilDiv(S + T, 4), lambda s, t: -(-(s + t) // 4)),
        (f.Max(S, T, 4) - 1, lambda s, t: max(s, t, 4) - 1),
        (3 * f.Min(S, T), lambda s, t: 3 * min(s, t)),
        (f.CleanDiv(6 * S, 2), lambda s, t: 3 * s),
    ],
)
def test_sizes_are_printed_so_that_they_evaluate_to_the_same(expression, meaning):
    for values in VALUES:
        assert evaluate(printed(expression), values) == meaning(values["batch"], values["sequence"])


def test_a_size_that_depends_on_data_is_refused():
    with pytest.raises(TraceError, match="u0, a value computed while the model runs"):
        printed(S * Symbol("u0", integer=True))


def test_arithmetic_that_programs_lack_is_refused():
    with pytest.raises(TraceError, match="which programs cannot express"):
        printed(sympy.sqrt(S))


@pytest.mark.parametrize(
    ("shape", "strides", "expected"),
    [
        ((S, T, sympy.Integer(8)), (8 * T, sympy.Integer(8), sympy.Integer(1)), True),
        ((S, T, sympy.Integer(8)), (T * 2 * 4, sympy.Integer(8), sympy.Integer(1)), True),
        ((S, T, sympy.Integer(8)), (sympy.Integer(8), 8 * S, sympy.Integer(1)), False),
        ((S, sympy.Integer(1), sympy.Integer(8)), (sympy.Integer(8), 99 * S, sympy.Integer(1)), True),
        ((S, T), (sympy.Integer(0), sympy.Integer(1)), False),
    ],
)
def test_row_major_layouts_are_known_for_every_size(shape, strides, expected):
    assert is_row_major(shape, strides) is expected
