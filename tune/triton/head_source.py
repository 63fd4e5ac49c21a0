"""Prints what makes the queries and the new keys of an attention form as functions that its kernel calls.

The work is generated from the form's own calls, whatever they are: a rotary embedding, a norm of each head before it.
A row is one head of one token, its columns are the head's elements; a function returns a tile of rows instead of
storing it.
"""

from typing import NamedTuple

import msgspec

from tune_model.runtime.execution.invoke import references
from tune_model.runtime.expression import symbols
from tune_model.runtime.kernel import Aligned, Requirement, Within
from tune_model.runtime.program import Call, Form, Parameter, Ref, TensorType
from tune_model.tune.attention import AttentionForm
from tune_model.tune.candidate import Rejected
from tune_model.tune.loops.assemble import remove_axis
from tune_model.tune.loops.body import read_body
from tune_model.tune.loops.ir import LoopNest
from tune_model.tune.loops.lower import lower
from tune_model.tune.loops.rounding import elide_rounding
from tune_model.tune.triton.emit import Operands
from tune_model.tune.triton.launch import Argument
from tune_model.tune.triton.row_source import Loop, RowPrinter

__all__ = ["HeadFunctions", "head_functions"]


class HeadFunctions(NamedTuple):
    """Two functions of (rows, row_count, operands, BLOCK) and what they share.

    Attributes:
        queries: Text of `body`, for tiles of a group of heads.
        keys: Text of `body`, for one head.
        operands: The tuple of pointers and integers that both take.
        requires: What must hold for other sizes than the form's.
    """

    queries: str
    keys: str
    operands: tuple[Argument, ...]
    requires: tuple[Requirement, ...]


def head_functions(form: Form, read: AttentionForm, group_rows: int, block: int) -> HeadFunctions | Rejected:
    """Print the functions of a form that makes its queries and new keys.

    Args:
        form: Concrete.
        read: The same form by roles.
        group_rows: Rows of a tile of queries.
        block: Columns of a tile: at least a head's elements.
    """
    key = read.append.args[2] if read.append is not None else None
    if not isinstance(key, Ref):
        return Rejected("unsupported", "queries that are made for a cache that is appended elsewhere")
    operands = Operands(form)
    texts: list[str] = []
    requires: dict[Requirement, None] = {}
    slots = {p.name for p in form.parameters}
    for name, rows in ((read.q.name, group_rows), (key.name, 1)):
        nest = _nest(form, read.made, name)
        if isinstance(nest, Rejected):
            return nest
        texts.append(RowPrinter(nest, form, rows, block, Loop(), operands).returned().source)
        requires.update((r, None) for r in nest.requires if _slots_of(r) <= slots)
    return HeadFunctions(texts[0], texts[1], operands.arguments(), tuple(requires))


def _nest(form: Form, made: tuple[Call, ...], name: str) -> LoopNest | Rejected:
    """Lower what makes a value; its last axis is the columns, whether something is reduced over them or not."""
    makers = {result: call for call in made for result in call.results}
    if name not in makers:
        return Rejected("unsupported", f"{name} is a slot, other heads are made")
    needed = _needed(makers, name)
    calls = tuple(call for call in made if call in needed)
    value = read_body(Form("pointwise", (), form.parameters, calls, ())).values[name]
    # As if it lay in memory row by row: it never does.
    result = Parameter(name, TensorType(value.dtype, value.shape))
    nest = lower(Form("reduction", (), form.parameters, calls, (result,)))
    if isinstance(nest, Rejected):
        return nest
    width = value.shape[-1]
    if nest.inner > 1 or len(nest.axes) < 2 or nest.axes[-1].size != width:
        return Rejected("unsupported", f"heads of {width} elements that are no axis of their own")
    return elide_rounding(_without_tokens(msgspec.structs.replace(nest, inner=1)))


def _without_tokens(nest: LoopNest) -> LoopNest:
    """Drop axes of one element behind the rows' own: there is one token, and numbers of rows need no dividing by it."""
    for k in range(len(nest.axes) - 2, 0, -1):
        if nest.axes[k].size == 1:
            alone = Within(nest.axes[k].extent, 1, 1)
            nest = remove_axis(nest, k)
            nest = msgspec.structs.replace(nest, requires=(*nest.requires, alone))
    return nest


def _needed(makers: dict[str | None, Call], name: str) -> list[Call]:
    found: list[Call] = []
    pending = [name]
    while pending:
        call = makers.get(pending.pop())
        if call is not None and call not in found:
            found.append(call)
            pending += references([*call.args, *(value for _, value in call.kwargs)])
    return found


def _slots_of(requirement: Requirement) -> set[str]:
    if isinstance(requirement, Aligned):
        return {requirement.slot}
    return {symbol.partition(".")[0] for symbol in symbols(requirement.expression)}
