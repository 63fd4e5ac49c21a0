"""A region to its canonical form, in three steps: find its loops, write its calls over them, name everything.

Attention keeps its four dims: its kernels know what they mean.
"""

from collections.abc import Mapping

from tune_model.extract.algebra import polynomial
from tune_model.extract.layout import make_type, strides_of
from tune_model.extract.regions.axes import Misfit, dims_of
from tune_model.extract.regions.emit import Emitter
from tune_model.extract.regions.loops import find_loops
from tune_model.extract.regions.naming import Canonical, Emitted, name_form
from tune_model.extract.regions.region import Operand, Region
from tune_model.runtime.expression import Dim
from tune_model.runtime.program import TensorType

__all__ = ["canonicalise"]


def canonicalise(region: Region, types: Mapping[str, TensorType]) -> Canonical:
    """Return the canonical form of a region.

    Args:
        region: What to turn into a form.
        types: Type of every value that the region makes.

    Raises:
        Misfit: Its calls have no common set of loops, or a result lies in memory in another order than they run.
    """
    if region.kind == "attention":
        return name_form(_attention(region, types))
    known = {**types, **{o.name: o.type for o in region.operands}}
    axes = dims_of(region.calls, known)
    names = [o.name for o in region.operands]
    loops = find_loops(axes, known, region.calls, region.results, names)
    emitter = Emitter(axes, loops, known)
    for name in names:
        emitter.operand(name)
    for call in region.calls:
        emitter.add(call)
    results: list[str] = []
    for name in region.results:
        results.append(emitter.result(name, frozenset([*names, *results])))
    operands = tuple(_fitting(o) for o in region.operands)
    return name_form(Emitted(region.kind, tuple(emitter.calls), operands, tuple(results), emitter.types))


def _fitting(operand: Operand) -> Operand:
    """Drop value ranges that depend on symbols: only attention's cost follows the values."""
    values = operand.values
    if values is None or (isinstance(values.low, int) and isinstance(values.high, int)):
        return operand
    return operand._replace(values=None)


def _attention(region: Region, types: Mapping[str, TensorType]) -> Emitted:
    layouts = {o.name: _settled(o.type) for o in region.operands}
    layouts.update({name: types[name] for name in region.results})
    if not region.results:
        raise Misfit("attention whose result nobody reads")
    return Emitted(region.kind, region.calls, region.operands, region.results, layouts, ordered=True)


def _settled(type_: TensorType) -> TensorType:
    """Give dims of size 1 the stride that continues what follows them, since it does not matter."""
    strides: list[Dim] = []
    run = polynomial(1)
    for size, stride in zip(reversed(type_.shape), reversed(strides_of(type_)), strict=True):
        here = run if size == 1 else polynomial(stride)
        strides.append(here.dim)
        run = here * polynomial(size)
    return make_type(type_.dtype, type_.shape, tuple(reversed(strides)))
