"""Forms of linear layers as extract states them, and plans that hold them; tests compare with extract's own."""

from collections.abc import Sequence
from typing import Final, NamedTuple

from tune_model.extract.cost import flops, size_bytes
from tune_model.extract.labels import label
from tune_model.extract.task import NumericRules, Plan, PlannedTask, Site, Task, task_key
from tune_model.runtime.program import (
    Apply,
    Call,
    Form,
    Input,
    Output,
    Parameter,
    Program,
    Ref,
    TensorType,
    Weight,
    fingerprint,
)

__all__ = [
    "gelu_form",
    "gelu_tail",
    "linear_form",
    "llama_forms",
    "plan_of",
    "residual_form",
    "residual_tail",
    "swiglu_form",
    "swiglu_tail",
    "task_of",
]

DTYPE: Final = "bfloat16"

_PROGRAM: Final = "shapes"

_REST_OF_A_MODEL: Final = 1 << 32
"""Bytes that a model reads between two uses of a weight: these shapes belong to models larger than any cache."""


def linear_form(m: int, n: int, k: int, *, bias: bool = False) -> Form:
    """Return a linear layer over m rows of k, its weight [n, k]."""
    return _form(m, n, k, _Tail(), bias=bias)


def gelu_form(m: int, n: int, k: int) -> Form:
    """Return a linear layer with a bias and the exact gelu."""
    return _form(m, n, k, _Tail((Call("aten.gelu.default", (Ref("t0"),), results=("t1",)),)), bias=True)


def residual_form(m: int, n: int, k: int, *, bias: bool = False) -> Form:
    """Return a linear layer whose result is added to a matrix of its size."""
    slot = "a3" if bias else "a2"
    tail = (Call("aten.add.Tensor", (Ref("t0"), Ref(slot)), results=("t1",)),)
    return _form(m, n, k, _Tail(tail, reads_residual=True), bias=bias)


def swiglu_form(m: int, n: int, k: int) -> Form:
    """Return a merged gate and up projection, its weight [n, k], and the gating: a result of n / 2 columns."""
    half = n // 2
    tail = (
        Call("aten.slice.Tensor", (Ref("t0"), -1, 0, half), results=("t1",)),
        Call("aten.silu.default", (Ref("t1"),), results=("t2",)),
        Call("aten.slice.Tensor", (Ref("t0"), -1, half, n), results=("t3",)),
        Call("aten.mul.Tensor", (Ref("t2"), Ref("t3")), results=("t4",)),
    )
    return _form(m, n, k, _Tail(tail, half))


def gelu_tail(m: int, n: int) -> Form:
    """Return what follows the product in `gelu_form`, as a form of its own."""
    whole = TensorType(DTYPE, (m * n,))
    call = Call("aten.gelu.default", (Ref("a0"),), results=("t0",))
    return Form("pointwise", (), (Parameter("a0", whole),), (call,), (Parameter("t0", whole),))


def residual_tail(m: int, n: int) -> Form:
    """Return what follows the product in `residual_form`."""
    whole = TensorType(DTYPE, (m * n,))
    call = Call("aten.add.Tensor", (Ref("a0"), Ref("a1")), results=("t0",))
    parameters = (Parameter("a0", whole), Parameter("a1", whole))
    return Form("pointwise", (), parameters, (call,), (Parameter("t0", whole),))


def swiglu_tail(m: int, n: int) -> Form:
    """Return what follows the product in `swiglu_form`: both inputs are halves of its rows."""
    half = TensorType(DTYPE, (m, n // 2), (n, 1))
    body = (
        Call("aten.silu.default", (Ref("a0"),), results=("t0",)),
        Call("aten.mul.Tensor", (Ref("t0"), Ref("a1")), results=("t1",)),
    )
    result = Parameter("t1", TensorType(DTYPE, (m, n // 2)))
    return Form("pointwise", (), (Parameter("a0", half), Parameter("a1", half)), body, (result,))


class _Tail(NamedTuple):
    calls: tuple[Call, ...] = ()
    columns: int = 0
    reads_residual: bool = False


def _form(m: int, n: int, k: int, tail: _Tail, *, bias: bool = False) -> Form:
    parameters = [Parameter("a0", TensorType(DTYPE, (m, k))), Parameter("a1", TensorType(DTYPE, (n, k)), "weight")]
    if bias:
        parameters.append(Parameter("a2", TensorType(DTYPE, (n,)), "weight"))
    read = tuple(Ref(p.name) for p in parameters)
    if tail.reads_residual:
        parameters.append(Parameter(f"a{len(parameters)}", TensorType(DTYPE, (m, n))))
    body = (Call("aten.linear.default", read, results=("t0",)), *tail.calls)
    result = Parameter(body[-1].results[0] or "", TensorType(DTYPE, (m, tail.columns or n)))
    return Form("matmul", (), tuple(parameters), body, (result,))


def llama_forms(decode: Sequence[int], prefill: Sequence[int], scale: int = 1) -> tuple[Form, ...]:
    """Return the distinct matmuls of Llama-3-8B, merged and with their epilogues, heaviest first.

    Args:
        decode: Batch sizes.
        prefill: Lengths of one prompt, of which the last position alone gets logits.
        scale: Sizes are divided by this.
    """
    hidden, inner, heads, vocabulary = 4096 // scale, 14336 // scale, 6144 // scale, 128256 // scale
    forms: dict[Form, None] = {}
    for m in sorted({*decode, *prefill}, reverse=True):
        forms[swiglu_form(m, 2 * inner, hidden)] = None
        forms[residual_form(m, hidden, inner)] = None
        forms[linear_form(m, heads, hidden)] = None
        forms[residual_form(m, hidden, hidden)] = None
        if m in decode:
            forms[linear_form(m, vocabulary, hidden)] = None
    if prefill:
        forms[linear_form(1, vocabulary, hidden)] = None
    return tuple(forms)


def task_of(form: Form) -> Task:
    """Return the task of a concrete form under the default rules."""
    return Task(form, NumericRules())


def plan_of(forms: Sequence[Form]) -> Plan:
    """Return a plan that tunes forms in the order given, at most 300 of them.

    Every form reads weights of its own, so none has to agree with another on a layout. The plan's program reads much
    more than any cache holds, so weights are timed cold.

    Args:
        forms: Concrete.
    """
    forms = tuple(dict.fromkeys(forms))
    inputs: list[Input] = []
    weights = [Weight("rest", TensorType("int8", (_REST_OF_A_MODEL,)), ("rest",))]
    steps: list[Apply] = []
    values: dict[str, TensorType] = {}
    outputs: list[Output] = []
    for number, form in enumerate(forms):
        names = tuple(f"{parameter.name}.{number}" for parameter in form.parameters)
        for name, parameter in zip(names, form.parameters, strict=True):
            if parameter.role == "weight":
                weights.append(Weight(name, parameter.type, (name,)))
            else:
                inputs.append(Input(name, parameter.type))
        made = tuple(f"{result.name}.{number}" for result in form.results)
        values |= {name: result.type for name, result in zip(made, form.results, strict=True)}
        outputs += [Output(name, name) for name in made]
        steps.append(Apply(fingerprint(form), names, made, ()))
    program = Program(
        name=_PROGRAM,
        symbols=(),
        inputs=tuple(inputs),
        weights=tuple(weights),
        constants=(),
        forms={fingerprint(form): form for form in forms},
        steps=tuple(steps),
        values=values,
        outputs=tuple(outputs),
    )
    return Plan((program,), tuple(_planned(f, place) for place, f in enumerate(forms)), (), ())


def _planned(form: Form, place: int) -> PlannedTask:
    task = task_of(form)
    site = Site(_PROGRAM, (), fingerprint(form), (), 1)
    # The tuner begins where weight x time is largest; weights that fall this fast keep the order given.
    weight = 8.0**-place / (1.0 + size_bytes(form) / 4e6 + flops(form) / 8e8)
    return PlannedTask(task_key(task), label(form), task, (site,), weight, flops(form), size_bytes(form))
