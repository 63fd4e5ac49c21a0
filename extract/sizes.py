"""Sympy sizes, as torch.export leaves them, to the expression texts of `runtime.expression`."""

from collections.abc import Mapping

import sympy
import torch
from torch.utils._sympy import functions

from tune_model.extract.tracing.front_end import TraceError
from tune_model.runtime.expression import Dim

__all__ = ["SizePrinter", "is_row_major", "size_expression"]


def size_expression(size: int | torch.SymInt) -> sympy.Expr:
    """Return a size as a sympy expression, with everything the tracer learnt about its symbols replaced."""
    if isinstance(size, torch.SymInt):
        return sympy.sympify(size.node.shape_env.replace(size.node.expr) if size.node.shape_env else size.node.expr)
    return sympy.Integer(int(size))


class SizePrinter:
    """Prints sizes over the program's symbols.

    Args:
        names: What each of the tracer's symbols is called in the program.
    """

    def __init__(self, names: Mapping[sympy.Symbol, str]) -> None:
        self._symbols = {symbol: sympy.Symbol(name, integer=True, positive=True) for symbol, name in names.items()}
        self._printed: dict[sympy.Expr, Dim] = {}

    def named(self, size: int | torch.SymInt) -> sympy.Expr:
        """Return the size over the program's symbols, so that equal sizes compare equal."""
        expression = size_expression(size)
        return expression if expression.is_Integer else expression.xreplace(self._symbols)

    def print(self, size: int | torch.SymInt) -> Dim:
        """Return an integer, or the text of a size that depends on symbols.

        Raises:
            TraceError: The size depends on data, or uses arithmetic that programs cannot express.
        """
        if not isinstance(size, torch.SymInt):
            return int(size)
        return self.print_expression(self.named(size))

    def print_expression(self, expression: sympy.Expr) -> Dim:
        """Print a sympy expression over the program's symbols."""
        known = self._printed.get(expression)
        if known is None:
            known = int(expression) if expression.is_Integer else self._text(expression, 0)
            self._printed[expression] = known
        return known

    def _text(self, e: sympy.Expr, level: int) -> str:
        """Print with parentheses where the surrounding operator (0 sum, 1 product, 2 right of a product) needs them."""
        if e.is_Integer:
            return str(int(e)) if int(e) >= 0 or level == 0 else f"({int(e)})"
        if e.is_Symbol:
            if e not in self._symbols.values():
                raise TraceError(
                    f"a size depends on {e}, a value computed while the model runs; expected sizes that depend only on"
                    " the shapes of the inputs. Models with data-dependent sizes cannot be tuned as one program"
                )
            return str(e.name)
        if e.is_Add:
            text = self._sum(e)
            return text if level == 0 else f"({text})"
        if e.is_Mul:
            return self._product(e, level)
        if e.is_Pow and e.exp.is_Integer and int(e.exp) > 0:
            text = "*".join([self._text(e.base, 1)] * int(e.exp))
            return f"({text})" if level == 2 else text
        return self._function(e, level)

    def _sum(self, e: sympy.Expr) -> str:
        text = ""
        for term in e.as_ordered_terms():
            coefficient, rest = term.as_coeff_Mul()
            if text and coefficient.is_negative:
                text += f" - {self._text(-coefficient * rest, 1)}"
            else:
                text += (" + " if text else "") + self._text(term, 1 if text else 0)
        return text

    def _product(self, e: sympy.Expr, level: int) -> str:
        coefficient, rest = e.as_coeff_Mul()
        if not coefficient.is_Integer:  # (1/2)*s0: exact by construction, since sizes are integers
            numerator, denominator = sympy.Integer(coefficient.p), sympy.Integer(coefficient.q)
            text = f"{self._text(numerator * rest, 1)} // {int(denominator)}"
            return text if level == 0 else f"({text})"
        # Floor division must not be followed by a product's next factor unparenthesised, hence level 2.
        factors = [*rest.as_ordered_factors()] if rest.is_Mul else [rest]
        parts = [self._text(f, 2) for f in factors] + ([] if coefficient == 1 else [self._text(coefficient, 2)])
        text = "*".join(parts)
        return f"({text})" if level == 2 and len(parts) > 1 else text

    def _function(self, e: sympy.Expr, level: int) -> str:
        arguments = e.args
        if isinstance(e, functions.CeilToInt | functions.FloorToInt | functions.ToFloat | functions.TruncToInt):
            return self._text(arguments[0], level) if arguments[0].is_integer else self._refuse(e)
        if isinstance(e, functions.CeilDiv):
            return f"cdiv({self._text(arguments[0], 0)}, {self._text(arguments[1], 0)})"
        if isinstance(e, functions.FloorDiv | functions.CleanDiv):
            text = f"{self._text(arguments[0], 1)} // {self._text(arguments[1], 2)}"
            return text if level == 0 else f"({text})"
        if isinstance(e, functions.Mod | functions.PythonMod):
            text = f"{self._text(arguments[0], 1)} % {self._text(arguments[1], 2)}"
            return text if level == 0 else f"({text})"
        if isinstance(e, functions.Max | functions.Min | sympy.Max | sympy.Min):
            name = "max" if isinstance(e, functions.Max | sympy.Max) else "min"
            return f"{name}({', '.join(sorted(self._text(a, 0) for a in arguments))})"
        return self._refuse(e)

    @staticmethod
    def _refuse(e: sympy.Expr) -> str:
        raise TraceError(
            f"a size is {e}, which programs cannot express; expected + - * // % cdiv min max over input sizes"
        )


def is_row_major(shape: tuple[sympy.Expr, ...], strides: tuple[sympy.Expr, ...]) -> bool:
    """Say whether a layout is contiguous for every value of the symbols; the stride of a size 1 dim is free."""
    expected = sympy.Integer(1)
    for size, stride in zip(reversed(shape), reversed(strides), strict=True):
        if size == 1:
            continue
        if stride != expected and sympy.expand(stride - expected) != 0:
            return False
        expected = expected * size
    return True
