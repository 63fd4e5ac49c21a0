"""What a model is at run time: a `Program` is a flat list of steps over named values; a `Form` is a step's inside.

A step is an ATen `Call` executed as is, or an `Apply` of a `Form`: a small function (matmul with its epilogue, a
reduction with the pointwise work around it, attention, a pointwise chain) that 32 equal layers share and for which the
tuner picks a kernel. A form's body is always a valid ATen sequence, so it is at once the definition, the baseline
and the fallback. Types only: how programs run is in `executor`, how they are stored is here by being msgspec structs.
"""

import hashlib
from collections.abc import Mapping
from typing import Literal

import msgspec

from tune_model.runtime.expression import Dim, evaluate

__all__ = [
    "Apply",
    "Arg",
    "Call",
    "Cast",
    "Concatenate",
    "Constant",
    "Form",
    "FormKind",
    "Input",
    "Items",
    "Output",
    "Pack",
    "Parameter",
    "Program",
    "Real",
    "Ref",
    "Size",
    "Step",
    "Symbol",
    "TensorType",
    "TorchName",
    "Transform",
    "Transpose",
    "ValueRange",
    "Weight",
    "bind_form",
    "fingerprint",
]


class TensorType(msgspec.Struct, frozen=True, omit_defaults=True):
    """Element type and layout of a tensor.

    Attributes:
        dtype: Torch's name without the prefix: `bfloat16`.
        shape: Sizes; expressions over the symbols of the program or form that holds the type.
        strides: In elements; `None` means contiguous, row-major.
    """

    dtype: str
    shape: tuple[Dim, ...]
    strides: tuple[Dim, ...] | None = None


class Ref(msgspec.Struct, frozen=True, tag="ref"):
    """An argument that is a tensor value."""

    name: str


class Size(msgspec.Struct, frozen=True, tag="size"):
    """An argument that is a symbolic integer."""

    expression: str


class Items(msgspec.Struct, frozen=True, tag="items"):
    """An argument that is a list."""

    items: tuple["Arg", ...]


class TorchName(msgspec.Struct, frozen=True, tag="torch"):
    """A dtype, layout, memory format or device; `device` has the one name `device`: wherever the program runs."""

    kind: Literal["dtype", "layout", "memory_format", "device"]
    name: str


class Real(msgspec.Struct, frozen=True, tag="real"):
    """A float that JSON cannot hold: `inf`, `-inf` or `nan`."""

    text: Literal["inf", "-inf", "nan"]


Arg = bool | int | float | str | None | Ref | Size | Items | TorchName | Real


class Call(msgspec.Struct, frozen=True, tag="call", omit_defaults=True):
    """One operator call.

    Attributes:
        op: Qualified name with its overload, `aten.linear.default`, or one of ours, `tune_model.append_kv`.
        args: Positional arguments.
        kwargs: Keyword arguments by name.
        results: Names of the tensors it returns, in order; `None` for one that nobody reads.
    """

    op: str
    args: tuple[Arg, ...]
    kwargs: tuple[tuple[str, Arg], ...] = ()
    results: tuple[str | None, ...] = ()


class ValueRange(msgspec.Struct, frozen=True):
    """Which integers an index-like tensor holds when a task is measured: uniform in [low, high]."""

    low: Dim
    high: Dim


class Parameter(msgspec.Struct, frozen=True, omit_defaults=True):
    """An input or a result of a form.

    Attributes:
        name: Slot name: `a0, a1, ...` for inputs; results carry the name their value has in the body (`t3`).
        type: Over the form's dims.
        role: `weight` is constant between calls (read cold, may be re-laid out); `cache` is written in place.
        values: For integer tensors: what to fill with when measuring.
    """

    name: str
    type: TensorType
    role: Literal["activation", "weight", "cache"] = "activation"
    values: ValueRange | None = None


FormKind = Literal["matmul", "reduction", "pointwise", "attention"]


class Form(msgspec.Struct, frozen=True, omit_defaults=True):
    """A region in canonical form: equal regions have equal forms, whatever model, layer or phase they come from.

    Names are canonical: dims `d0, d1, ...` in order of appearance, inputs `a0, ...`, values `t0, ...`. Leading dims
    that every operand allows are collapsed, so a linear over (batch, sequence, k) is the form over (d0, k).
    A form whose `dims` is empty is concrete: that is what gets tuned.

    Attributes:
        kind: What it is made of, and so which candidates may compete.
        dims: Symbols of the sizes. A dim used only in `ValueRange`s (a decode step's `context`) is a hint.
        parameters: Inputs, in the order of `Apply.inputs`.
        body: The ATen sequence: definition, baseline and fallback.
        results: Outputs, in the order of `Apply.outputs`.
    """

    kind: FormKind
    dims: tuple[str, ...]
    parameters: tuple[Parameter, ...]
    body: tuple[Call, ...]
    results: tuple[Parameter, ...]


class Apply(msgspec.Struct, frozen=True, tag="apply"):
    """A step that runs a form.

    The tensors bound to `inputs` and `outputs` are reinterpreted (same memory, other sizes and strides) as the form's
    parameter types say; collapsing dims is thus free.

    Attributes:
        form: Fingerprint of the form in `Program.forms`.
        inputs: Program values, one per parameter.
        outputs: Program values, one per result.
        dims: What each of the form's dims is, over the program's symbols.
    """

    form: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    dims: tuple[Dim, ...]


Step = Call | Apply


class Concatenate(msgspec.Struct, frozen=True, tag="concatenate"):
    """Join all sources along `dim`."""

    dim: int


class Transpose(msgspec.Struct, frozen=True, tag="transpose"):
    """Store the transpose contiguously; the value's type keeps its shape and gets the strides of a transposed view."""


class Cast(msgspec.Struct, frozen=True, tag="cast"):
    """Convert to another dtype."""

    dtype: str


class Pack(msgspec.Struct, frozen=True, tag="pack"):
    """Re-lay out for one library: `mkldnn`, or `mkl:M` for MKL's layout prepared for M rows."""

    layout: str


Transform = Concatenate | Transpose | Cast | Pack


class Weight(msgspec.Struct, frozen=True, omit_defaults=True):
    """A value that comes from the checkpoint.

    Attributes:
        name: Program value.
        type: After all transforms but `Pack` (a packed tensor is opaque).
        sources: Checkpoint names, in the order they are concatenated.
        transforms: Applied in order, once, at load.
    """

    name: str
    type: TensorType
    sources: tuple[str, ...]
    transforms: tuple[Transform, ...] = ()


class Constant(msgspec.Struct, frozen=True):
    """A small tensor stored in the artifact (rotary frequencies, position ids); several programs may share one.

    Attributes:
        name: Program value.
        type: Its type.
        key: Name in `constants.safetensors`.
    """

    name: str
    type: TensorType
    key: str


class Symbol(msgspec.Struct, frozen=True, omit_defaults=True):
    """A size that differs between calls.

    Attributes:
        name: `s0`, or a readable one such as `batch`.
        minimum: Smallest legal value.
        maximum: Largest legal value.
        input: Input whose shape binds it; `None` for a hint (`context`) that a caller may pass.
        axis: Which dim of that input.
        default: Value of a hint that the caller does not pass.
    """

    name: str
    minimum: int
    maximum: int
    input: str | None = None
    axis: int = 0
    default: int | None = None


class Input(msgspec.Struct, frozen=True, omit_defaults=True):
    """A tensor the caller passes; `cache` inputs are written in place and kept between calls."""

    name: str
    type: TensorType
    role: Literal["user", "cache"] = "user"
    values: ValueRange | None = None


class Output(msgspec.Struct, frozen=True):
    """A tensor the caller gets: its public name and the value it is."""

    name: str
    value: str


class Program(msgspec.Struct, frozen=True):
    """One phase of a model (`prefill`, `decode`, `forward`).

    Attributes:
        name: Phase.
        symbols: Sizes that differ between calls, and hints.
        inputs: In calling order; values are named like inputs.
        weights: Values from the checkpoint.
        constants: Values from the artifact.
        forms: By fingerprint.
        steps: In execution order.
        values: Type of every value that a step makes.
        outputs: What a call returns.
    """

    name: str
    symbols: tuple[Symbol, ...]
    inputs: tuple[Input, ...]
    weights: tuple[Weight, ...]
    constants: tuple[Constant, ...]
    forms: dict[str, Form]
    steps: tuple[Step, ...]
    values: dict[str, TensorType]
    outputs: tuple[Output, ...]


def fingerprint(struct: msgspec.Struct) -> str:
    """Return 16 hex digits of the SHA-256 of a struct's canonical JSON."""
    return hashlib.sha256(msgspec.json.encode(struct, order="deterministic")).hexdigest()[:16]


def _bind_type(type_: TensorType, values: Mapping[str, int]) -> TensorType:
    strides = None if type_.strides is None else tuple(evaluate(s, values) for s in type_.strides)
    return TensorType(type_.dtype, tuple(evaluate(s, values) for s in type_.shape), strides)


def _bind_parameter(parameter: Parameter, values: Mapping[str, int]) -> Parameter:
    hint = parameter.values
    if hint is not None:
        hint = ValueRange(evaluate(hint.low, values), evaluate(hint.high, values))
    return Parameter(parameter.name, _bind_type(parameter.type, values), parameter.role, hint)


def _bind_arg(arg: Arg, values: Mapping[str, int]) -> Arg:
    if isinstance(arg, Size):
        return evaluate(arg.expression, values)
    if isinstance(arg, Items):
        return Items(tuple(_bind_arg(a, values) for a in arg.items))
    return arg


def bind_call(call: Call, values: Mapping[str, int]) -> Call:
    """Replace every symbolic size in a call by its value."""
    return Call(
        call.op,
        tuple(_bind_arg(a, values) for a in call.args),
        tuple((k, _bind_arg(a, values)) for k, a in call.kwargs),
        call.results,
    )


def bind_form(form: Form, dims: tuple[int, ...]) -> Form:
    """Return the concrete form at one grid point.

    Args:
        form: Symbolic.
        dims: One value for each of `form.dims`.
    """
    values = dict(zip(form.dims, dims, strict=True))
    return Form(
        form.kind,
        (),
        tuple(_bind_parameter(p, values) for p in form.parameters),
        tuple(bind_call(c, values) for c in form.body),
        tuple(_bind_parameter(p, values) for p in form.results),
    )
