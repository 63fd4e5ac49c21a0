"""What a report is made from: an open artifact, or the contents of one that is about to be written."""

from typing import NamedTuple

import tune_model
from tune_model.extract.request import Request
from tune_model.package.contents import (
    ArtifactContents,
    build_replay,
    measure_model,
    named_architecture,
    portable_request,
)
from tune_model.package.format.manifest import ModelFacts
from tune_model.package.format.records import Record, records_of
from tune_model.package.memory import MemoryPlan, plan_memory
from tune_model.package.read import Artifact
from tune_model.runtime.program import Program
from tune_model.runtime.replay import Replay
from tune_model.tune.target import CudaTarget, Target

__all__ = ["ReportSource", "from_artifact", "from_contents"]


class ReportSource(NamedTuple):
    """The part of an artifact that a report tells about.

    Attributes:
        name: Of the model.
        tune_model: Version that wrote it.
        model: In numbers.
        request: What was extracted.
        target: What it was tuned on.
        programs: One per phase.
        records: Tasks, choices, skipped steps and notes.
        config: The configuration's text.
        memory: What it will occupy when it is served.
    """

    name: str
    tune_model: str
    model: ModelFacts
    request: Request
    target: Target
    programs: tuple[Program, ...]
    records: tuple[Record, ...]
    config: str
    memory: MemoryPlan


def from_artifact(artifact: Artifact) -> ReportSource:
    """Take an open artifact.

    Raises:
        ArtifactError: Its records cannot be read.
    """
    manifest = artifact.manifest
    programs = tuple(artifact.programs.values())
    return ReportSource(
        manifest.name,
        manifest.tune_model,
        manifest.model,
        manifest.request,
        manifest.target,
        programs,
        tuple(artifact.records()),
        artifact.config(),
        _memory(programs, artifact.replay, manifest.request, manifest.model, manifest.target),
    )


def from_contents(contents: ArtifactContents) -> ReportSource:
    """Take what is about to be written; the report is the one that the written artifact would give."""
    request, tuning = portable_request(contents.request), contents.tuning
    order = {phase.name: number for number, phase in enumerate(request.phases)}
    programs = tuple(sorted(tuning.plan.programs, key=lambda p: (order.get(p.name, len(order)), p.name)))
    model = measure_model(programs, contents.architecture or named_architecture(request))
    return ReportSource(
        contents.name,
        tune_model.__version__,
        model,
        request,
        tuning.target,
        programs,
        tuple(records_of(tuning)),
        contents.config_yaml,
        _memory(programs, build_replay(tuning), request, model, tuning.target),
    )


def _memory(
    programs: tuple[Program, ...], replay: Replay, request: Request, model: ModelFacts, target: Target
) -> MemoryPlan:
    return plan_memory(
        {program.name: program for program in programs},
        replay,
        {phase.name: phase.grid for phase in request.phases},
        rows=request.max_batch,
        weight_bytes=model.weight_bytes,
        graphs=isinstance(target, CudaTarget),
    )
