"""Contents with the report that an artifact carries, as a tune makes it just before they are written."""

from dataclasses import replace

from tune_model.package.contents import ArtifactContents
from tune_model.pipeline.report.gather import gather
from tune_model.pipeline.report.html import render_html
from tune_model.pipeline.report.source import from_contents

__all__ = ["with_report"]


def with_report(contents: ArtifactContents) -> ArtifactContents:
    """Return the contents with their page; it is what `tune-model report` makes of the written artifact."""
    return replace(contents, report_html=render_html(gather(from_contents(contents))))
