"""A product and what is added to it as the one operator that libraries have for it: `addmm`, `baddbmm`.

Extract writes these as a product and pointwise work, which a generated kernel can join. A scaled sum over the output
tile is the library's own epilogue, so it competes as well; batched, it is the only fused kernel a CPU has.
"""

from collections.abc import Iterator, Mapping
from typing import Final, NamedTuple

from tune_model.extract.task import Task
from tune_model.runtime.kernel import Kernel
from tune_model.runtime.program import Arg, Call, Form, FormKind, Ref
from tune_model.tune.candidate import Built, Config, Effort, Rejected
from tune_model.tune.target import CudaTarget, Target

__all__ = ["FAMILY", "AtenAddition"]

_OPERATORS: Final = {
    "aten.linear.default": "aten.addmm.default",
    "aten.mm.default": "aten.addmm.default",
    "aten.bmm.default": "aten.baddbmm.default",
}


class _Sum(NamedTuple):
    """`beta * added + alpha * product`."""

    product: Call
    added: str
    alpha: float
    beta: float

    def is_residual(self, form: Form) -> bool:
        """Say whether it is a linear layer's result plus a matrix of its type."""
        types = {p.name: p.type for p in form.parameters}
        plain = (self.alpha, self.beta) == (1, 1) and self.product.op == "aten.linear.default"
        return plain and types[self.added] == form.results[0].type


class AtenAddition:
    """See the module."""

    name = "aten_addition"
    version = 1
    kinds: frozenset[FormKind] = frozenset({"matmul"})

    def accepts(self, task: Task, target: Target) -> Rejected | None:
        """Accept a product without a bias, and a scaled tensor added to it, scaled or not."""
        found = _read(task.form)
        if isinstance(found, Rejected):
            return found
        if isinstance(target, CudaTarget) and found.is_residual(task.form):
            return Rejected("unsupported", "a residual, which triton_epilogue adds with the same operator")
        return None

    def start(self, task: Task, target: Target) -> Config:
        """Return the only configuration."""
        return ()

    def configurations(self, task: Task, target: Target, effort: Effort) -> Iterator[Config]:
        """Yield the only configuration."""
        yield ()

    def build(self, task: Task, config: Config, target: Target) -> Built | Rejected:
        """State the call."""
        found = _read(task.form)
        if isinstance(found, Rejected):
            return found
        (result,) = task.form.results
        left, right = found.product.args
        steps: list[Call] = []
        if found.product.op == "aten.linear.default" and isinstance(right, Ref):
            turned = f"{right.name}_t"
            steps.append(Call("aten.t.default", (right,), (), (turned,)))
            right = Ref(turned)
        factors: list[tuple[str, Arg]] = [("alpha", found.alpha)] if found.alpha != 1 else []
        factors += [("beta", found.beta)] if found.beta != 1 else []
        given = (Ref(found.added), left, right)
        steps.append(Call(_OPERATORS[found.product.op], given, tuple(factors), (result.name,)))
        return Built(Kernel(tuple(steps)), {})


def _read(form: Form) -> _Sum | Rejected:
    """Read a body of a product, perhaps a multiplication of it or of the other operand by a number, and their sum."""
    product, *between = form.body
    if product.op not in _OPERATORS or len(product.args) != 2 or product.kwargs:
        return Rejected("unsupported", "no product of two matrices first")
    types = {p.name: p.type for p in form.parameters}
    if any(not isinstance(arg, Ref) or arg.name not in types for arg in product.args):
        return Rejected("unsupported", "a product of what is not the form's own")
    if not between or between[-1].op != "aten.add.Tensor" or len(between) > 2:
        return Rejected("unsupported", "more or something else than a sum after the product")
    factors: dict[str, tuple[str, float]] = {}
    if len(between) == 2:
        scaled = _scaled(between[0])
        if scaled is None:
            return Rejected("unsupported", "something else than a multiplication by a number before the sum")
        factors[scaled[0]] = scaled[1:]
    found = _operands(form, between[-1], factors)
    if isinstance(found, Rejected):
        return found
    made = product.results[0] or ""
    added = next((name for name in found if name != made), "")
    tensors = [arg.name for arg in product.args if isinstance(arg, Ref)]
    if made not in found or added not in types:
        return Rejected("unsupported", "not a sum of the product and an operand")
    if {types[name].dtype for name in (*tensors, added)} != {form.results[0].type.dtype}:
        return Rejected("unsupported", "a sum of several types")
    return _Sum(product, added, found[made], found[added])


def _operands(form: Form, add: Call, factors: Mapping[str, tuple[str, float]]) -> dict[str, float] | Rejected:
    """Return what a sum adds and how often.

    Args:
        form: Whose only result it must be.
        add: The sum.
        factors: By a value's name, of what it is a multiple and which.
    """
    names = [arg.name for arg in add.args if isinstance(arg, Ref)]
    alpha = dict(add.kwargs).get("alpha", 1)  # of the second operand
    if len(add.args) != 2 or len(names) != 2 or set(dict(add.kwargs)) - {"alpha"} or not isinstance(alpha, int | float):
        return Rejected("unsupported", "a sum with something else than two tensors and a number")
    if len(form.results) != 1 or add.results != (form.results[0].name,):
        return Rejected("unsupported", "a sum that is not the only result")
    found: dict[str, float] = {}
    for name, times in zip(names, (1, alpha), strict=True):
        source, factor = factors.get(name, (name, 1))
        found[source] = found.get(source, 0) + times * factor
    return found


def _scaled(call: Call) -> tuple[str, str, float] | None:
    """Return what a multiplication by a number makes, its operand and the number."""
    if call.op != "aten.mul.Scalar" or len(call.args) != 2 or call.kwargs:
        return None
    operand, factor = call.args
    result = call.results[0]
    if not isinstance(operand, Ref) or result is None or not isinstance(factor, int | float):
        return None
    return result, operand.name, factor


FAMILY = AtenAddition()
