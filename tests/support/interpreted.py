"""Runs kernel plans in Triton's interpreter on CPU tensors, launch facts included. Needs TRITON_INTERPRET=1.

What a plan states (arguments, grids, workspaces, requirements) is evaluated from the tensors exactly as the runtime
does, so a wrong stride or grid shows here without a GPU.
"""

import math
from typing import Any

import numpy as np
import torch
import triton.language as tl
from triton.language.extra import libdevice
from triton.runtime import interpreter

from tune_model.runtime.expression import evaluate
from tune_model.runtime.program import Call, Form, Ref
from tune_model.runtime.replay import contiguous_strides, slot_sizes, unmet
from tune_model.tune.triton.launch import Constant, KernelPlan, Launch, SizeOf, Slot

_LIBDEVICE = {
    "tanh": np.tanh,
    "trunc": np.trunc,
    "rint": np.rint,
    "expm1": np.expm1,
    "log10": np.log10,
    "log1p": np.log1p,
    "tan": np.tan,
    "atan": np.arctan,
    "sinh": np.sinh,
    "cosh": np.cosh,
    "fmod": np.fmod,
    "pow": np.power,
    "atan2": np.arctan2,
}


def _in_numpy(function: Any) -> Any:
    def call(*arguments: Any) -> Any:
        data = function(*(a.handle.data for a in arguments)).astype(arguments[0].handle.data.dtype)
        return tl.tensor(interpreter.TensorHandle(data, arguments[0].dtype.scalar), arguments[0].type)

    return call


# The interpreter has no libdevice: its functions do nothing there.
for _name, _function in _LIBDEVICE.items():
    setattr(libdevice, _name, _in_numpy(_function))


def _dot(self: Any, a: Any, b: Any, d: Any, precision: Any, imprecise: Any) -> Any:
    """The interpreter holds bfloat16 as bits and would multiply those."""
    wide = [
        (h.data.astype(np.uint32) << 16).view(np.float32) if h.dtype.scalar == tl.bfloat16 else h.data for h in (a, b)
    ]
    return interpreter.TensorHandle(np.matmul(*wide, dtype=d.data.dtype) + d.data, d.dtype.scalar)


def _truncate(self: Any, source: Any, type_: Any) -> Any:
    """The interpreter cuts bits off where the hardware rounds to the nearest even."""
    if type_.scalar == tl.bfloat16 and source.dtype.scalar == tl.float32:
        rounded = torch.from_numpy(np.ascontiguousarray(source.data)).bfloat16()
        return interpreter.TensorHandle(rounded.view(torch.uint16).numpy(), tl.bfloat16)
    return self.cast_impl(source, type_)


interpreter.InterpreterBuilder.create_dot = _dot
interpreter.InterpreterBuilder.create_fp_trunc = _truncate


def empty(type_: Any) -> torch.Tensor:
    """A tensor of a concrete type whose every element is NaN, or the largest integer."""
    dtype = getattr(torch, type_.dtype)
    strides = type_.strides or contiguous_strides(type_.shape)
    span = 1 + sum((n - 1) * s for n, s in zip(type_.shape, strides, strict=True))
    fill = math.nan if dtype.is_floating_point else (True if dtype == torch.bool else torch.iinfo(dtype).max)
    return torch.full((max(span, 0),), fill, dtype=dtype).as_strided(type_.shape, strides)


def call(step: Call, slots: dict[str, torch.Tensor]) -> None:
    """Run one operator over slots."""
    from tune_model.runtime.invoke import prepare_call

    names = list(slots) + [r for r in step.results if r is not None and r not in slots]
    values: list[Any] = [*slots.values(), *([None] * (len(names) - len(slots)))]
    prepare_call(step, {n: i for i, n in enumerate(names)}, torch.device("cpu"))(values)
    slots.update({n: v for n, v in zip(names, values, strict=True) if v is not None})


def run_body(form: Form, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
    """The form's own sequence."""
    slots = dict(zip((p.name for p in form.parameters), inputs, strict=True))
    for step in form.body:
        call(step, slots)
    return [slots[r.name] for r in form.results]


def run_body_exactly(form: Form, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
    """The form's sequence in float64: floating inputs are widened, casts to narrower floats are left out."""
    from tune_model.runtime.program import TorchName

    wide = [t.double() if t.is_floating_point() else t for t in inputs]
    slots = dict(zip((p.name for p in form.parameters), wide, strict=True))
    for step in form.body:

        def widen(argument: Any) -> Any:
            narrow = isinstance(argument, TorchName) and argument.name in {"bfloat16", "float16", "float32"}
            return TorchName("dtype", "float64") if narrow else argument

        kwargs = tuple((k, widen(v)) for k, v in step.kwargs)
        call(Call(step.op, tuple(widen(a) for a in step.args), kwargs, step.results), slots)
    return [slots[r.name] for r in form.results]


def interpret(plan: KernelPlan, form: Form, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
    """Run a plan on tensors laid out as the form's parameters; results are poisoned before."""
    sizes = slot_sizes(form)
    problems = [p for r in plan.requires if (p := unmet(r, sizes, {})) is not None]
    assert not problems, problems
    slots = dict(zip((p.name for p in form.parameters), inputs, strict=True))
    slots.update({r.name: empty(r.type) for r in form.results})
    for workspace in plan.workspaces:
        dtype = getattr(torch, workspace.dtype)
        slots[workspace.name] = torch.full((evaluate(workspace.size, sizes),), 0 if workspace.zeroed else math.nan).to(
            dtype
        )

    def value(argument: Any) -> Any:
        match argument:
            case Slot(name, dtype):
                assert str(slots[name].dtype) == f"torch.{dtype}", name
                return slots[name]
            case SizeOf(expression, divisible):
                number = evaluate(expression, sizes)
                assert not divisible or number % 16 == 0, expression
                return number
            case Constant(constant):
                return constant
            case _:
                return tuple(value(item) for item in argument)

    for step in plan.launches:
        if not isinstance(step, Launch):
            call(step, slots)
            continue
        grid = tuple(evaluate(g, sizes) for g in step.grid)
        if 0 not in grid:
            step.function[grid](**{name: value(a) for name, a in step.arguments.items()})
    return [slots[r.name] for r in form.results]


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Relative Frobenius error; NaN counts as infinitely wrong."""
    a, e = actual.double(), expected.double()
    difference = torch.linalg.vector_norm(a - e) / torch.linalg.vector_norm(e).clamp_min(1e-30)
    return math.inf if math.isnan(difference) else difference.item()


def fill(form: Form, seed: int = 0) -> list[torch.Tensor]:
    """Random inputs laid out as a form's parameters say."""
    generator = torch.Generator().manual_seed(seed)
    tensors = []
    for parameter in form.parameters:
        tensor = empty(parameter.type)
        if tensor.is_floating_point():
            scale = (
                parameter.type.shape[-1] ** -0.5
                if parameter.role == "weight" and len(parameter.type.shape) == 2
                else 1.0
            )
            tensor.copy_(torch.randn(tuple(tensor.shape), generator=generator) * scale)
        elif parameter.values is not None:
            low, high = parameter.values.low, parameter.values.high
            tensor.copy_(torch.randint(low, high + 1, tuple(tensor.shape), generator=generator))
        else:
            tensor.copy_(torch.randint(0, 2, tuple(tensor.shape), generator=generator))
        tensors.append(tensor)
    return tensors


__all__ = ["Ref", "call", "empty", "fill", "interpret", "relative_error", "run_body", "run_body_exactly"]
