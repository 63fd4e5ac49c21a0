"""Plans that hold given forms, for the tuner."""

from collections.abc import Sequence
from typing import Final

from tune_model.extract.cost import flops, size_bytes
from tune_model.extract.labels import label
from tune_model.extract.task import NumericRules, Plan, PlannedTask, Site, Task, task_key
from tune_model.runtime.program import Apply, Form, Input, Output, Program, TensorType, Weight, fingerprint

__all__ = ["plan_of", "task_of"]

_PROGRAM: Final = "shapes"

_REST_OF_A_MODEL: Final = 1 << 32
"""Bytes that a model reads between two uses of a weight: these shapes belong to models larger than any cache."""


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
    # Nobody runs these shapes one after the other, so how long all of them take together says nothing: no occurrence.
    site = Site(_PROGRAM, (), fingerprint(form), (), 0)
    # The tuner begins where weight x time is largest; weights that fall this fast keep the order given.
    weight = 8.0**-place / (1.0 + size_bytes(form) / 4e6 + flops(form) / 8e8)
    return PlannedTask(task_key(task), label(form), task, (site,), weight, flops(form), size_bytes(form))
