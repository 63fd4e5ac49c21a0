"""Runs kernel plans in Triton's interpreter on CPU tensors, launch facts included. Needs TRITON_INTERPRET=1.

What a plan states (arguments, grids, workspaces, requirements) is evaluated from the tensors exactly as the runtime
does, so a wrong stride or grid shows here without a GPU.
"""

import math
from typing import Any

import numpy as np
import torch
import triton.language as tl
from form_runs import call, empty
from triton.language.extra import libdevice
from triton.runtime import interpreter

from tune_model.runtime.expression import evaluate
from tune_model.runtime.program import Form
from tune_model.runtime.replay import slot_sizes, unmet
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


def _bfloat16(self: Any, value: float) -> Any:
    """The interpreter has constants of every float but this one."""
    bits = torch.tensor([value], dtype=torch.bfloat16).view(torch.uint16).numpy()
    return interpreter.TensorHandle(bits, tl.bfloat16)


interpreter.InterpreterBuilder.get_bf16 = _bfloat16
interpreter.InterpreterBuilder.create_dot = _dot
interpreter.InterpreterBuilder.create_fp_trunc = _truncate


def interpret(plan: KernelPlan, form: Form, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
    """Run a plan on tensors laid out as the form's parameters; results are poisoned before."""
    sizes = slot_sizes(form)
    problems = [p for r in plan.requires if (p := unmet(r, sizes, {})) is not None]
    assert not problems, problems
    slots = dict(zip((p.name for p in form.parameters), inputs, strict=True))
    slots.update({r.name: empty(r.type) for r in form.results})
    for workspace in plan.workspaces:
        dtype = getattr(torch, workspace.dtype)
        slots[workspace.name] = torch.full(
            (evaluate(workspace.size, sizes),), 0 if workspace.zeroed or workspace.counters else math.nan
        ).to(dtype)

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
