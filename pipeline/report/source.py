"""What a report is made from: an open artifact, or the contents of one that is about to be written."""

from typing import NamedTuple

import tune_model
from tune_model.extract.request import Request
from tune_model.package.contents import ArtifactContents, measure_model, named_architecture, portable_request
from tune_model.package.format.manifest import ModelFacts
from tune_model.package.format.records import Record, records_of
from tune_model.package.read import Artifact
from tune_model.runtime.program import Program
from tune_model.tune.target import Target

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
    """

    name: str
    tune_model: str
    model: ModelFacts
    request: Request
    target: Target
    programs: tuple[Program, ...]
    records: tuple[Record, ...]
    config: str


def from_artifact(artifact: Artifact) -> ReportSource:
    """Take an open artifact.

    Raises:
        ArtifactError: Its records cannot be read.
    """
    manifest = artifact.manifest
    return ReportSource(
        manifest.name,
        manifest.tune_model,
        manifest.model,
        manifest.request,
        manifest.target,
        tuple(artifact.programs.values()),
        tuple(artifact.records()),
        artifact.config(),
    )


def from_contents(contents: ArtifactContents) -> ReportSource:
    """Take what is about to be written; the report is the one that the written artifact would give."""
    request = portable_request(contents.request)
    programs = contents.tuning.plan.programs
    order = {phase.name: number for number, phase in enumerate(request.phases)}
    return ReportSource(
        contents.name,
        tune_model.__version__,
        measure_model(programs, contents.architecture or named_architecture(request)),
        request,
        contents.tuning.target,
        tuple(sorted(programs, key=lambda program: (order.get(program.name, len(order)), program.name))),
        tuple(records_of(contents.tuning)),
        contents.config_yaml,
    )
