"""Running a family's candidates as the tuner and the runtime do."""

from collections.abc import Iterator, Sequence

import torch
from form_builder import run_results

from tune_model.extract.task import NumericRules, Task
from tune_model.runtime.execution.binding import bind_kernel
from tune_model.runtime.program import Form
from tune_model.runtime.replay import slot_sizes, unmet
from tune_model.runtime.weights.transforms import pack_weight
from tune_model.tune.candidate import Built, Effort, Family
from tune_model.tune.target import Target


def built(
    family: Family, form: Form, target: Target, effort: Effort = Effort.BALANCED
) -> Iterator[tuple[object, Built]]:
    """Build every configuration; each must build."""
    task = Task(form, NumericRules())
    reason = family.accepts(task, target)
    assert reason is None, reason
    configs = list(family.configurations(task, target, effort))
    assert configs[0] == family.start(task, target)
    assert len(set(configs)) == len(configs)
    for config in configs:
        made = family.build(task, config, target)
        assert isinstance(made, Built), (config, made)
        yield config, made


def refusals(made: Built, form: Form) -> list[str]:
    """Say which of a kernel's requirements a form does not meet."""
    found = [unmet(r, slot_sizes(form), {}) for r in made.kernel.requires]
    return [f for f in found if f is not None]


def run(made: Built, form: Form, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Bind a kernel to a form and call it; weights are packed as it wants them."""
    layouts = dict(made.kernel.layouts)
    packed = [
        pack_weight(t, layouts[p.name]) if p.name in layouts else t
        for p, t in zip(form.parameters, inputs, strict=True)
    ]
    return bind_kernel(made.kernel, form, made.code, torch.device("cpu"))(packed)


def compare(made: Built, form: Form, inputs: Sequence[torch.Tensor], bound: float) -> None:
    """Compare with the ATen body."""
    for got, expected in zip(run(made, form, inputs), run_results(form, inputs), strict=True):
        assert got.dtype == expected.dtype
        torch.testing.assert_close(got, expected, rtol=bound, atol=bound)
