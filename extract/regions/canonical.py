"""A region to its canonical form, in three steps: find its loops, write its calls over them, name everything.

Attention keeps its four dims: its kernels know what they mean. So do norms over groups of dims, and what follows them.
"""

from collections.abc import Mapping

from tune_model.extract.algebra import polynomial
from tune_model.extract.layout import is_row_major, make_type, strides_of
from tune_model.extract.regions.axes import Misfit, dims_of
from tune_model.extract.regions.emit import Emitter
from tune_model.extract.regions.loops import find_loops
from tune_model.extract.regions.naming import Canonical, Emitted, name_form
from tune_model.extract.regions.region import Operand, Region
from tune_model.extract.regions.vocabulary import OpClass, classify
from tune_model.extract.rewrite.graph import refs
from tune_model.runtime.expression import Dim
from tune_model.runtime.program import Call, Ref, TensorType

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
    if any(classify(call) is OpClass.AS_WRITTEN or _is_across(call, known) for call in region.calls):
        return name_form(_as_written(region, types))
    _require_own_numbers(region)
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


def _require_own_numbers(region: Region) -> None:
    """Refuse lookups whose table or numbers something else reads too: forms declare them in dims of their own."""
    read = [name for call in region.calls for name in dict.fromkeys(refs(call))]
    for call in region.calls:
        if classify(call) is OpClass.LOOKUP:
            made = {r for c in region.calls for r in c.results}
            if any(read.count(name) > 1 or name in made for name in refs(call)):
                raise Misfit("a lookup whose table or numbers are read by more of the region")


def _is_across(call: Call, types: Mapping[str, TensorType]) -> bool:
    """Say whether a softmax runs over a dim that is not the last: its rows do not lie along its result's memory."""
    if not call.op.startswith(("aten.softmax.", "aten.log_softmax.")) or not isinstance(call.args[0], Ref):
        return False
    return call.args[1] != len(types[call.args[0].name].shape) - 1


def _as_written(region: Region, types: Mapping[str, TensorType]) -> Emitted:
    """Keep calls and dims as they are; only what runs over the same dims may be among them."""
    whole = [call for call in region.calls if classify(call) is not OpClass.POINTWISE]
    if len(whole) > 1 or any(classify(call) not in {OpClass.AS_WRITTEN, OpClass.NORMALISE} for call in whole):
        raise Misfit("views or joins beside a norm over groups of dims")
    layouts = {o.name: _settled(o.type) for o in region.operands}
    layouts.update({name: types[name] for name in region.results})
    if not all(is_row_major(types[name]) for name in region.results):
        raise Misfit("a result in another order than its dims")
    return Emitted(region.kind, region.calls, tuple(_fitting(o) for o in region.operands), region.results, layouts)


def _settled(type_: TensorType) -> TensorType:
    """Give dims of size 1 the stride that continues what follows them, since it does not matter."""
    strides: list[Dim] = []
    run = polynomial(1)
    for size, stride in zip(reversed(type_.shape), reversed(strides_of(type_)), strict=True):
        here = run if size == 1 else polynomial(stride)
        strides.append(here.dim)
        run = here * polynomial(size)
    return make_type(type_.dtype, type_.shape, tuple(reversed(strides)))
