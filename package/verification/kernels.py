"""Every winner against its form's definition in float64, on this machine, by the rule the tuner used.

A kernel's relative error may be twice that of the plain operators plus one unit in the last place of the output type.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from tune_model.extract.task import NumericRules
from tune_model.package.format.records import TaskRecord
from tune_model.package.read import Artifact
from tune_model.package.verification.check import Check
from tune_model.runtime.errors import TuneModelError
from tune_model.runtime.execution.binding import bind_kernel
from tune_model.runtime.kernel import Kernel
from tune_model.runtime.launch.machine_code import CodeLoader
from tune_model.runtime.program import Form, bind_form
from tune_model.runtime.replay import Entry, slot_sizes, unmet
from tune_model.tune.measuring.inputs import copy_layout, make_inputs, make_outputs, poison
from tune_model.tune.measuring.reference import Deviation, Expected, compare, expect, tolerance
from tune_model.tune.relayout import relaid_form, relay

__all__ = ["check_kernels"]

_SEED = 20


def check_kernels(artifact: Artifact, device: torch.device) -> Iterator[Check]:
    """Run every entry of the replay table once on fresh random inputs and compare.

    Raises:
        ArtifactError: The artifact's records cannot be read.
    """
    loader = CodeLoader(artifact.code)
    forms = {key: form for program in artifact.programs.values() for key, form in program.forms.items()}
    labels = {r.planned.key: r.planned.label for r in artifact.records() if isinstance(r, TaskRecord)}
    with _numeric_rules(artifact.manifest.request.rules), torch.no_grad():
        for key, entries in artifact.replay.forms.items():
            for entry in entries:
                name = f"kernel of {labels.get(entry.task, key)} at {entry.dims}: {entry.candidate}"
                yield _check_entry(name, entry, bind_form(forms[key], entry.dims), loader, device)


def _check_entry(name: str, entry: Entry, form: Form, loader: CodeLoader, device: torch.device) -> Check:
    try:
        kernel_form = relaid_form(form, entry.kernel.layouts)
        sizes = slot_sizes(kernel_form)
        problems = [p for r in entry.kernel.requires if (p := unmet(r, sizes, {})) is not None]
        if problems:
            return Check(name, "failed", problems[0], "a kernel that is legal where it won")
        (inputs,) = make_inputs(form, device, _SEED)
        expected = expect(form, inputs, device)
        allowed = tolerance(form, _run(Kernel(form.body), form, inputs, expected, loader, device))
        relaid = relay(form, inputs, entry.kernel.layouts)
        found = _run(entry.kernel, kernel_form, relaid, expected, loader, device)
    except (TuneModelError, RuntimeError) as error:
        lines = str(error).strip().splitlines() or [type(error).__name__]
        return Check(name, "failed", f"{type(error).__name__}: {lines[0]}", "a kernel that runs")
    passed = all(error <= limit for error, limit in zip(found.errors, allowed, strict=True))
    limit = max(allowed, default=0.0)
    return Check(name, "passed" if passed else "failed", f"error {found.worst:.2g}", f"at most {limit:.2g}")


def _run(
    kernel: Kernel,
    form: Form,
    inputs: tuple[torch.Tensor, ...],
    expected: Expected,
    loader: CodeLoader,
    device: torch.device,
) -> Deviation:
    """Run once into outputs that hold nothing right, on copies of the caches."""
    bound = bind_kernel(kernel, form, loader, device)
    pairs = zip(inputs, form.parameters, strict=True)
    copies = tuple(copy_layout(value) if parameter.role == "cache" else value for value, parameter in pairs)
    outputs = make_outputs(form, device)
    for output, reference in zip(outputs, expected.results, strict=True):
        poison(output, reference)
    results = bound(copies, outputs)
    return compare(results, copies, expected)


@contextmanager
def _numeric_rules(rules: NumericRules) -> Iterator[None]:
    """Give torch the rules the tasks were tuned under, and take them back."""
    before = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = rules.allow_tf32
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = before
