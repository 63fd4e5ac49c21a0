"""Applying a weight layout: to a concrete form, to tensors that are measured, and to the programs that are shipped.

`transposed` stores the transpose contiguously: same shape, other strides, so any ATen body still reads it. Every other
layout is a library's own packing, opaque to everything but that library's operators.
"""

from collections.abc import Mapping
from typing import Final

import msgspec
import torch

from tune_model.extract.task import Plan, PlannedTask, Site
from tune_model.runtime.program import (
    Apply,
    Form,
    Pack,
    Program,
    TensorType,
    Transform,
    Transpose,
    Weight,
    fingerprint,
)
from tune_model.runtime.weights.transforms import pack_weight

__all__ = ["TRANSPOSED", "Layouts", "apply_layouts", "relaid_form", "relay"]

TRANSPOSED: Final = "transposed"

Layouts = tuple[tuple[str, str], ...]
"""Slot and layout, for every slot that is not plain."""


def relaid_form(form: Form, layouts: Layouts) -> Form:
    """Return a form whose transposed weights say so in their strides; packed ones keep their type."""
    wanted = dict(layouts)
    if TRANSPOSED not in wanted.values():
        return form
    parameters = tuple(
        msgspec.structs.replace(p, type=_transpose(p.type)) if wanted.get(p.name) == TRANSPOSED else p
        for p in form.parameters
    )
    return msgspec.structs.replace(form, parameters=parameters)


def relay(form: Form, inputs: tuple[torch.Tensor, ...], layouts: Layouts) -> tuple[torch.Tensor, ...]:
    """Return one set of inputs with weights re-laid out; the others are shared.

    Raises:
        RuntimeError: The library cannot pack this weight.
    """
    wanted = dict(layouts)
    return tuple(
        _relay(value, wanted[p.name]) if p.name in wanted else value
        for p, value in zip(form.parameters, inputs, strict=True)
    )


def apply_layouts(plan: Plan, layouts: Mapping[str, Layouts]) -> Plan:
    """Write layouts into a plan.

    Args:
        plan: As extracted.
        layouts: Per form fingerprint. A weight is re-laid out when a form that reads it says so; all its readers do.
    """
    if not any(layouts.values()):
        return plan
    renamed = {
        key: fingerprint(relaid_form(form, layouts[key]))
        for program in plan.programs
        for key, form in program.forms.items()
    }
    programs = tuple(_relay_program(program, layouts, renamed) for program in plan.programs)
    tasks = tuple(_relay_task(task, renamed) for task in plan.tasks)
    return msgspec.structs.replace(plan, programs=programs, tasks=tasks)


def _relay_program(program: Program, layouts: Mapping[str, Layouts], renamed: Mapping[str, str]) -> Program:
    wanted: dict[str, str] = {}
    for step in program.steps:
        if isinstance(step, Apply):
            slots = dict(layouts[step.form])
            for parameter, value in zip(program.forms[step.form].parameters, step.inputs, strict=True):
                if parameter.name in slots:
                    wanted[value] = slots[parameter.name]
    steps = tuple(
        msgspec.structs.replace(step, form=renamed[step.form]) if isinstance(step, Apply) else step
        for step in program.steps
    )
    return msgspec.structs.replace(
        program,
        weights=tuple(_relay_weight(w, wanted[w.name]) if w.name in wanted else w for w in program.weights),
        forms={renamed[key]: relaid_form(form, layouts[key]) for key, form in program.forms.items()},
        steps=steps,
    )


def _relay_weight(weight: Weight, layout: str) -> Weight:
    transform: Transform = Transpose() if layout == TRANSPOSED else Pack(layout)
    type_ = _transpose(weight.type) if layout == TRANSPOSED else weight.type
    return msgspec.structs.replace(weight, type=type_, transforms=(*weight.transforms, transform))


def _relay_task(task: PlannedTask, renamed: Mapping[str, str]) -> PlannedTask:
    sites = tuple(
        Site(site.program, site.point, renamed[site.form], site.dims, site.occurrences) for site in task.sites
    )
    return msgspec.structs.replace(task, sites=sites)


def _transpose(type_: TensorType) -> TensorType:
    rows, _ = type_.shape
    return TensorType(type_.dtype, type_.shape, (1, rows))


def _relay(value: torch.Tensor, layout: str) -> torch.Tensor:
    return value.t().contiguous().t() if layout == TRANSPOSED else pack_weight(value, layout)
