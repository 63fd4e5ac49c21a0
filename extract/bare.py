"""The operator inside a fused form as a form of its own, for code that calls operators one by one.

A linear layer with a residual is one task for the model; another engine with the same layer calls the linear alone.
Only on request: these forms are tuned as well, with little weight, and no program applies them.
"""

from collections.abc import Sequence
from typing import Final

import msgspec

from tune_model.runtime.expression import Dim, rename, symbols
from tune_model.runtime.program import Arg, Call, Form, FormKind, Parameter, Program, Ref, TensorType, fingerprint

__all__ = ["bare_form", "with_bare_forms"]

_KINDS: Final[dict[str, FormKind]] = {
    "aten.linear.default": "matmul",
    "aten.rms_norm.default": "reduction",
    "aten.layer_norm.default": "reduction",
}


def with_bare_forms(program: Program) -> Program:
    """Add the bare form of every form that has one."""
    forms = dict(program.forms)
    for form in program.forms.values():
        bare = bare_form(form)
        if bare is not None:
            forms.setdefault(fingerprint(bare), bare)
    return msgspec.structs.replace(program, forms=dict(sorted(forms.items())))


def bare_form(form: Form) -> Form | None:
    """Return the one operator of a form that somebody may call by itself, over the same dims.

    `None` when there is none, several, or its operands are made inside the form in a way that hides their types.
    """
    calls = [call for call in form.body if call.op in _KINDS]
    if len(calls) != 1:
        return None
    (call,) = calls
    types = {p.name: p for p in form.parameters}
    operands = [arg.name for arg in call.args if isinstance(arg, Ref)]
    if operands[0] not in types:
        rows = _rows_inside(form, call)
        if rows is None:
            return None
        types[operands[0]] = Parameter(operands[0], rows)
    if any(name not in types for name in operands) or len(set(operands)) != len(operands):
        return None
    return _canonical(form.dims, call, [types[name] for name in operands])


def _rows_inside(form: Form, norm: Call) -> TensorType | None:
    """Return the type of a norm's input that the form makes: the rows that come in have it too."""
    if _KINDS[norm.op] != "reduction":
        return None
    first = form.parameters[0].type
    weights = [p.type for p in form.parameters if p.role == "weight" and len(p.type.shape) == 1]
    same = weights and len(first.shape) == 2 and first.strides is None and first.shape[1:] == weights[0].shape
    return first if same else None


def _canonical(dims: Sequence[str], call: Call, operands: Sequence[Parameter]) -> Form | None:
    """Spell the form as grouping spells a region of this one call."""
    used: dict[str, Dim] = {}
    for operand in operands:
        for size in operand.type.shape:
            for name in sorted(symbols(size)):
                used.setdefault(name, f"d{len(used)}")
    if list(used) != list(dims):
        return None  # the site's dims would mean something else
    names = {operand.name: f"a{i}" for i, operand in enumerate(operands)}
    parameters = tuple(Parameter(names[p.name], _renamed(p.type, used), p.role, p.values) for p in operands)
    rows = parameters[0].type
    shape = rows.shape
    if _KINDS[call.op] == "matmul":
        shape = (*rows.shape[:-1], parameters[1].type.shape[0])
    args = tuple(_renamed_arg(arg, names) for arg in call.args)
    body = Call(call.op, args, call.kwargs, ("t0",))
    result = Parameter("t0", TensorType(rows.dtype, shape))
    return Form(_KINDS[call.op], tuple(str(n) for n in used.values()), parameters, (body,), (result,))


def _renamed(type_: TensorType, names: dict[str, Dim]) -> TensorType:
    strides = None if type_.strides is None else tuple(rename(s, names) for s in type_.strides)
    return TensorType(type_.dtype, tuple(rename(s, names) for s in type_.shape), strides)


def _renamed_arg(arg: Arg, names: dict[str, str]) -> Arg:
    return Ref(names[arg.name]) if isinstance(arg, Ref) else arg
