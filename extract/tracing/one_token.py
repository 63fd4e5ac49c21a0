"""The decode step of a decoder, from its traced prefill: the same graph with a sequence of one token.

Exporting costs seconds per phase and this costs none. A test keeps it equal to what tracing one token gives.
"""

import msgspec

from tune_model.extract.algebra import same_all, tidy
from tune_model.extract.layout import make_type, strides_of
from tune_model.extract.tracing.front_end import Trace
from tune_model.extract.tracing.import_graph import IDENTITIES, references
from tune_model.runtime.expression import Dim, rename
from tune_model.runtime.program import Arg, Call, Input, Items, Output, Ref, Size, TensorType

__all__ = ["at_one_token"]

_ONE = {"sequence": 1}


def at_one_token(prefill: Trace) -> Trace | None:
    """Set `sequence` to 1 in a raw prefill program and drop its `logits_index`.

    Returns:
        `None` when the program uses `logits_index` for more than picking one position.
    """
    program = prefill.program
    values = {name: _type(type_) for name, type_ in program.values.items()}
    inputs = tuple(Input(i.name, _type(i.type), i.role, i.values) for i in program.inputs if i.name != "logits_index")
    types = {i.name: i.type for i in inputs} | {w.name: w.type for w in program.weights} | values
    types |= {c.name: c.type for c in program.constants}
    renamed: dict[str, str] = {}
    steps: list[Call] = []
    for step in program.steps:
        if not isinstance(step, Call):
            return None
        call = Call(
            step.op, _args(step.args, renamed), tuple((k, _arg(a, renamed)) for k, a in step.kwargs), step.results
        )
        if "logits_index" in references(call) and not _picks_position(call):
            return None
        kept = _unchanged(call, types)
        if kept is None:
            steps.append(call)
        else:
            renamed[str(call.results[0])] = kept
    outputs = tuple(Output(o.name, renamed.get(o.value, o.value)) for o in program.outputs)
    made = {r for s in steps for r in s.results}
    decode = msgspec.structs.replace(
        program,
        name="decode",
        symbols=tuple(s for s in program.symbols if s.name != "sequence"),
        inputs=inputs,
        steps=tuple(steps),
        values={name: type_ for name, type_ in values.items() if name in made},
        outputs=outputs,
    )
    return prefill._replace(program=decode, notes=(*prefill.notes, "prefill's graph at one token"))


def _dim(dim: Dim) -> Dim:
    return tidy(rename(dim, _ONE))


def _type(type_: TensorType) -> TensorType:
    strides = None if type_.strides is None else tuple(_dim(s) for s in type_.strides)
    return make_type(type_.dtype, tuple(_dim(s) for s in type_.shape), strides)


def _args(args: tuple[Arg, ...], renamed: dict[str, str]) -> tuple[Arg, ...]:
    return tuple(_arg(a, renamed) for a in args)


def _arg(arg: Arg, renamed: dict[str, str]) -> Arg:
    if isinstance(arg, Ref):
        return Ref(renamed.get(arg.name, arg.name))
    if isinstance(arg, Size):
        dim = _dim(arg.expression)
        return Size(dim) if isinstance(dim, str) else dim
    if isinstance(arg, Items):
        return Items(_args(arg.items, renamed))
    return arg


def _picks_position(call: Call) -> bool:
    """Whether a call is `hidden[:, logits_index]`."""
    match call:
        case Call("aten.index.Tensor", (Ref(), Items((None, Ref("logits_index"))))):
            return True
        case Call("aten.index_select.default", (Ref(), 1, Ref("logits_index"))):
            return True
    return False


def _unchanged(call: Call, types: dict[str, TensorType]) -> str | None:
    """Name the value that a call returns as it is, if it does now."""
    if not call.args or not isinstance(call.args[0], Ref) or len(call.results) != 1:
        return None
    source = call.args[0].name
    if _picks_position(call):
        return source
    if call.op not in IDENTITIES:
        return None
    before, after = types[source], types[str(call.results[0])]
    alike = before.dtype == after.dtype and same_all(before.shape, after.shape)
    return source if alike and same_all(_known(before), _known(after)) else None


def _known(type_: TensorType) -> tuple[Dim, ...]:
    """Strides, but 0 where the size is 1 and they mean nothing."""
    return tuple(0 if n == 1 else s for n, s in zip(type_.shape, strides_of(type_), strict=True))
