"""The plan behind an artifact, as extract made it: what a new tune needs, without the model.

Programs are stored with their weights' layouts settled; here the layouts are taken out again. That the result is what
was extracted is checked against the tasks in the records, which are stored as they were raced.
"""

from collections.abc import Mapping
from typing import Final

import msgspec

from tune_model.extract.task import Plan, PlannedTask, Site, Skipped
from tune_model.package.format.records import NoteRecord, SkippedRecord, TaskRecord
from tune_model.package.read import Artifact
from tune_model.runtime.errors import TuneModelError
from tune_model.runtime.program import (
    Apply,
    Form,
    Pack,
    Program,
    TensorType,
    Transpose,
    Weight,
    bind_form,
    fingerprint,
)

__all__ = ["ReplanError", "plan_of"]

_SETTLED: Final = (Transpose, Pack)
"""Transforms that tuning adds; extract makes others only."""


class ReplanError(TuneModelError):
    """An artifact's programs and records do not fit together, so it cannot be tuned again from them alone."""


def plan_of(artifact: Artifact) -> Plan:
    """Return the plan that an artifact was tuned from.

    Raises:
        ReplanError: The records tell of other forms than the programs hold.
        ArtifactError: The records cannot be read.
    """
    records = list(artifact.records())
    renamed: dict[str, str] = {}
    programs = tuple(_plain_program(program, renamed) for program in artifact.programs.values())
    tasks = tuple(_plain_task(r.planned, renamed) for r in records if isinstance(r, TaskRecord))
    forms = {key: form for program in programs for key, form in program.forms.items()}
    for task in tasks:
        _check(task, forms, artifact)
    return Plan(
        programs=programs,
        tasks=tasks,
        skipped=tuple(_skipped(r) for r in records if isinstance(r, SkippedRecord)),
        notes=tuple(r.text for r in records if isinstance(r, NoteRecord)),
    )


def _skipped(record: SkippedRecord) -> Skipped:
    return record.skipped


def _plain_program(program: Program, renamed: dict[str, str]) -> Program:
    """Take the layouts out of a program; adds to `renamed` what each form is called without them."""
    transposed = {w.name for w in program.weights if any(isinstance(t, Transpose) for t in w.transforms)}
    slots: dict[str, set[str]] = {key: set() for key in program.forms}
    for step in program.steps:
        if isinstance(step, Apply):
            parameters = program.forms[step.form].parameters
            bound = zip(parameters, step.inputs, strict=True)
            slots[step.form] |= {parameter.name for parameter, value in bound if value in transposed}
    plain = {key: _plain_form(form, slots[key]) for key, form in program.forms.items()}
    renamed |= {key: fingerprint(form) for key, form in plain.items()}
    steps = tuple(
        msgspec.structs.replace(step, form=renamed[step.form]) if isinstance(step, Apply) else step
        for step in program.steps
    )
    return msgspec.structs.replace(
        program,
        weights=tuple(_plain_weight(weight) for weight in program.weights),
        forms={renamed[key]: form for key, form in plain.items()},
        steps=steps,
    )


def _plain_form(form: Form, slots: set[str]) -> Form:
    parameters = tuple(
        msgspec.structs.replace(p, type=_row_major(p.type)) if p.name in slots else p for p in form.parameters
    )
    return msgspec.structs.replace(form, parameters=parameters)


def _plain_weight(weight: Weight) -> Weight:
    kept = tuple(t for t in weight.transforms if not isinstance(t, _SETTLED))
    turned = any(isinstance(t, Transpose) for t in weight.transforms)
    return msgspec.structs.replace(weight, transforms=kept, type=_row_major(weight.type) if turned else weight.type)


def _row_major(type_: TensorType) -> TensorType:
    return TensorType(type_.dtype, type_.shape)


def _plain_task(task: PlannedTask, renamed: Mapping[str, str]) -> PlannedTask:
    sites = tuple(
        Site(site.program, site.point, renamed.get(site.form, site.form), site.dims, site.occurrences)
        for site in task.sites
    )
    return msgspec.structs.replace(task, sites=sites)


def _check(task: PlannedTask, forms: Mapping[str, Form], artifact: Artifact) -> None:
    for site in task.sites:
        form = forms.get(site.form)
        if form is None or bind_form(form, site.dims) != task.task.form:
            raise ReplanError(
                f"{artifact.path}: the records' task {task.label!r} is not what program {site.program!r} holds at "
                f"{dict(site.point)}; expected an artifact as tune-model wrote it; tune the model again"
            )
