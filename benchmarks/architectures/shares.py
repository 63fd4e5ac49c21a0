"""What of a model's arithmetic is in tasks, whether its attention was recognised, and what could still be merged."""

from collections.abc import Iterator, Mapping
from typing import Any, Final

import torch
from torch.utils.flop_counter import FlopCounterMode

from tune_model.extract.cost import flops
from tune_model.extract.layout import VIEWS
from tune_model.extract.rewrite.graph import refs
from tune_model.package.read import Artifact
from tune_model.runtime.execution.invoke import torch_dtype, torch_name
from tune_model.runtime.expression import evaluate
from tune_model.runtime.operators.allowed import resolve
from tune_model.runtime.program import (
    Apply,
    Arg,
    Call,
    Items,
    Program,
    Real,
    Ref,
    Size,
    TensorType,
    TorchName,
    bind_form,
)

__all__ = ["shares_of"]

_MATMULS: Final = frozenset({"aten.linear.default", "aten.mm.default", "aten.bmm.default", "aten.matmul.default"})
_SDPA: Final = "aten.scaled_dot_product_attention.default"
_META: Final = torch.device("meta")


def shares_of(artifact: Artifact) -> dict[str, Any]:
    """Look at all programs.

    Returns:
        `covered`: Share of the floating-point operations of matmuls and convolutions, attention apart, that are in
        tasks, over one call of each program at the first point of its grid. `attention`: Regions of attention, in the
        first program. `spelled_attention`: It has none although it takes a softmax. `unmerged`: Values that several
        matmuls read, in the first program.
    """
    inside = outside = 0
    grids = {phase.name: phase.grid for phase in artifact.manifest.request.phases}
    for program in artifact.programs.values():
        grid = grids.get(program.name, {})
        sizes = {s.name: grid.get(s.name, (s.default or s.minimum,))[0] for s in program.symbols}
        inside += _in_tasks(program, sizes)
        outside += _left_out(program, sizes)
    first = next(iter(artifact.programs.values()))
    attention = sum(isinstance(s, Apply) and first.forms[s.form].kind == "attention" for s in first.steps)
    attention += sum(isinstance(s, Call) and s.op == _SDPA for s in first.steps)
    softmax = any(".softmax." in call.op for call in _all_calls(first))
    return {
        "covered": inside / (inside + outside) if inside + outside else None,
        "attention": attention,
        "spelled_attention": not attention and softmax,
        "unmerged": _unmerged(first),
    }


def _all_calls(program: Program) -> Iterator[Call]:
    for step in program.steps:
        yield from (step,) if isinstance(step, Call) else program.forms[step.form].body


def _in_tasks(program: Program, sizes: Mapping[str, int]) -> int:
    total = 0
    for step in program.steps:
        if isinstance(step, Apply) and program.forms[step.form].kind == "matmul":
            form = bind_form(program.forms[step.form], tuple(evaluate(d, sizes) for d in step.dims))
            total += flops(form)
    return total


def _left_out(program: Program, sizes: Mapping[str, int]) -> int:
    """Count by running the calls on tensors without memory."""
    types: dict[str, TensorType] = {
        **{i.name: i.type for i in program.inputs},
        **{w.name: w.type for w in program.weights},
        **{c.name: c.type for c in program.constants},
        **program.values,
    }

    def value(arg: Arg) -> Any:
        match arg:
            case Ref(name):
                shape = [evaluate(size, sizes) for size in types[name].shape]
                return torch.empty(shape, dtype=torch_dtype(types[name].dtype), device=_META)
            case Items(items):
                return [value(item) for item in items]
            case Size(expression):
                return evaluate(expression, sizes)
            case TorchName():
                return torch_name(arg, _META)
            case Real(text):
                return float(text)
        return arg

    total = 0
    for step in program.steps:
        if not isinstance(step, Call) or step.op in VIEWS or step.op == _SDPA or not step.op.startswith("aten."):
            continue
        args = [value(arg) for arg in step.args]
        if step.op == "aten._grouped_mm.default":  # each row meets one expert's matrix; without memory, bfloat16 only
            total += 2 * args[0].numel() * args[1].shape[-1]
            continue
        with FlopCounterMode(display=False) as counter:
            resolve(step.op)(*args, **{name: value(arg) for name, arg in step.kwargs})
        total += counter.get_total_flops()
    return total


def _unmerged(program: Program) -> int:
    """Count values that more than one product with a weight reads: those products could be one."""
    source = {step.results[0]: refs(step)[0] for step in program.steps if isinstance(step, Call) and step.op in VIEWS}
    weights = {w.name for w in program.weights}
    readers: dict[str, int] = {}
    for step in program.steps:
        form = program.forms[step.form] if isinstance(step, Apply) else None
        if form is None or form.kind != "matmul":
            continue
        bound = dict(zip((p.name for p in form.parameters), step.inputs, strict=True))
        call = next(c for c in form.body if c.op in _MATMULS)
        names = [bound.get(arg.name) for arg in call.args[:2] if isinstance(arg, Ref)]
        if len(names) < 2 or names[0] is None or names[1] not in weights:
            continue
        name = names[0]
        while name in source:
            name = source[name]
        readers[name] = readers.get(name, 0) + 1
    return sum(count > 1 for count in readers.values())
