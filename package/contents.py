"""What goes into an artifact, derived from what tune returned: replay table, model facts, a request without paths."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from tune_model.extract.request import ExportedSource, FactorySource, ModelSource, Request, TransformersSource
from tune_model.package.format.manifest import ModelFacts
from tune_model.package.format.tensors import element_bytes
from tune_model.runtime.kernel import CpuLaunch, CudaLaunch, Kernel
from tune_model.runtime.program import Program
from tune_model.runtime.replay import Entry, Replay
from tune_model.tune.candidate import label
from tune_model.tune.choice import Tuning

if TYPE_CHECKING:
    import torch

__all__ = [
    "ArtifactContents",
    "build_replay",
    "code_kinds",
    "measure_model",
    "named_architecture",
    "portable_request",
    "weight_sources",
]


@dataclass(frozen=True)
class ArtifactContents:
    """Everything an artifact is made of.

    Attributes:
        name: Of the model.
        request: As extract was asked.
        tuning: What tune returned.
        constants: Value of every `Constant.key` of the programs.
        config_yaml: The configuration's text, stored as it is.
        architecture: Class of the model, if known.
        weights: Embed these, by checkpoint names; `None` leaves weights to whoever loads.
        report_html: A report to carry along.
    """

    name: str
    request: Request
    tuning: Tuning
    constants: Mapping[str, "torch.Tensor"]
    config_yaml: str
    architecture: str | None = None
    weights: Mapping[str, "torch.Tensor"] | None = None
    report_html: str | None = None


def build_replay(tuning: Tuning) -> Replay:
    """Return the table that dispatch reads: for every form, the winner at every point it was tuned at."""
    choices = {choice.task: choice for choice in tuning.choices}
    forms: dict[str, dict[tuple[int, ...], Entry]] = {}
    for planned in tuning.plan.tasks:
        choice = choices[planned.key]
        for site in planned.sites:
            forms.setdefault(site.form, {})[site.dims] = Entry(
                dims=site.dims,
                task=planned.key,
                candidate=label(choice.winner),
                kernel=choice.kernel,
                median_us=choice.median_us,
                baseline_us=choice.baseline_us,
                gain_low=choice.gain_low,
                gain_high=choice.gain_high,
            )
    return Replay({form: tuple(points[dims] for dims in sorted(points)) for form, points in sorted(forms.items())})


def code_kinds(kernels: list[Kernel]) -> dict[str, Literal["cubin", "so"]]:
    """Return every piece of machine code that kernels launch, by SHA-256, and what kind of file it is."""
    kinds: dict[str, Literal["cubin", "so"]] = {}
    for kernel in kernels:
        for step in kernel.steps:
            if isinstance(step, CudaLaunch):
                kinds[step.code] = "cubin"
            elif isinstance(step, CpuLaunch):
                kinds[step.code] = "so"
    return kinds


def weight_sources(programs: tuple[Program, ...]) -> list[str]:
    """Return the checkpoint names that programs read, sorted."""
    return sorted({source for program in programs for weight in program.weights for source in weight.sources})


def measure_model(programs: tuple[Program, ...], architecture: str | None) -> ModelFacts:
    """Count parameters and bytes of the weights, each weight once however many programs read it."""
    weights = {
        msgspec.json.encode((weight.sources, weight.transforms)): weight.type
        for program in programs
        for weight in program.weights
    }
    parameters = size_bytes = 0
    for type_ in weights.values():
        elements = 1
        for size in type_.shape:
            elements *= int(size)  # a weight's sizes are known
        parameters += elements
        size_bytes += elements * element_bytes(type_.dtype)
    return ModelFacts(architecture, parameters, size_bytes)


def named_architecture(request: Request) -> str | None:
    """Return the class that a portable request's model configuration names, if it names one."""
    source = request.source
    if not isinstance(source, TransformersSource):
        return None
    names = (source.config or {}).get("architectures")
    return source.architecture or (names[0] if isinstance(names, list) and names else None)


def portable_request(request: Request) -> Request:
    """Return the request without paths of this machine, so that moving a model changes no byte of its artifact.

    Raises:
        OSError: The model's folder holds no readable config.json.
    """
    return msgspec.structs.replace(request, source=_portable_source(request.source))


def _portable_source(source: ModelSource) -> ModelSource:
    match source:
        case TransformersSource(folder=str(folder)):
            config: dict[str, Any] = json.loads((Path(folder) / "config.json").read_text(encoding="utf-8"))
            return TransformersSource(config=_without_paths(config), architecture=source.architecture)
        case TransformersSource(config=dict(config)):
            return TransformersSource(config=_without_paths(config), architecture=source.architecture)
        case FactorySource():
            return FactorySource(source.factory)
        case ExportedSource():
            return ExportedSource(Path(source.path).name)
        case _:
            return source


def _without_paths(config: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in config.items() if key not in {"_name_or_path", "name_or_path"}}
