"""`tune-model report ARTIFACT`: what was tuned and how it went, as one page, Markdown or JSON."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from tune_model.pipeline.options import artifact_argument, part_option

if TYPE_CHECKING:
    from tune_model.package.read import Artifact, ChoosePart
    from tune_model.pipeline.report.facts import Missing, ReportFacts, StepTime

__all__ = ["command"]

HELP = """Write a report of ARTIFACT: gain with its interval, floor, time per task, roofline, every race, rejections.

The page is one HTML file that opens offline on a desk or a phone, in light or dark; its scoreboard sorts and filters.
Tuning puts the same page into the artifact (report.html). Runs nothing of the artifact, needs no GPU and no weights.

\b
  tune-model report llama-3-8b.tuned                          writes llama-3-8b.report.html
  tune-model report llama-3-8b.tuned -o - --format md         Markdown, for a pull request
  tune-model report llama-3-8b.tuned --format json -o - | jq '.tasks[0]'
  tune-model report llama-3-8b.tuned --bench llama-3-8b.h200.json

The format follows the name given to -o (.html, .md, .json) unless --format says another.
"""

_FORMATS = ("html", "md", "json")
_BEGINNINGS = {"html": b"<!doctype html", "md": b"# ", "json": b'{\n "name"'}


@click.command("report", help=HELP)
@artifact_argument
@part_option
@click.option("-o", "--output", metavar="FILE", default=None, help="Where to write; - for standard output.")
@click.option(
    "--format", "format_", type=click.Choice(_FORMATS), default=None, help="HTML page (the default), Markdown or JSON."
)
@click.option(
    "--bench", "bench_path", metavar="FILE", default=None, help="Add measured steps: what `bench --save` wrote."
)
@click.option(
    "--misses",
    metavar="FILE",
    multiple=True,
    help="Add the sizes that servers ran untuned, from their coverage().save(FILE).",
)
def command(
    artifact_path: str,
    part: "ChoosePart | None",
    output: str | None,
    format_: str | None,
    bench_path: str | None,
    misses: tuple[str, ...],
) -> None:
    """Open, gather, render, write."""
    from tune_model.package.output import staged_document
    from tune_model.package.read import open_artifact
    from tune_model.pipeline.report.gather import gather
    from tune_model.pipeline.report.source import from_artifact

    format_ = format_ or _format_of(output)
    artifact = open_artifact(artifact_path, part)
    steps = None if bench_path is None else read_steps(Path(bench_path))
    missing = missed(artifact, [Path(path) for path in misses])
    text = render(gather(from_artifact(artifact), steps=steps, missing=missing), format_)
    place = output or f"{artifact.manifest.name}.report.{format_}"
    if place == "-":
        click.echo(text, nl=False)
    else:
        with staged_document(Path(place), f"a report as {format_}", _BEGINNINGS[format_]) as path:
            path.write_text(text, encoding="utf-8")
        click.echo(f"wrote {place}", err=True)


def render(facts: "ReportFacts", format_: str) -> str:
    """Return the facts in one of the formats."""
    import msgspec

    from tune_model.pipeline.report.html import render_html
    from tune_model.pipeline.report.markdown import render_markdown

    if format_ == "html":
        return render_html(facts)
    if format_ == "md":
        return render_markdown(facts)
    return msgspec.json.format(msgspec.json.encode(facts), indent=1).decode() + "\n"


def missed(artifact: "Artifact", paths: Sequence[Path]) -> "list[Missing]":
    """Return the sizes that servers ran and the artifact has no kernels tuned for, most frequent first.

    Raises:
        OtherWorkloadError: A file is of another model.
        CoverageFileError: A file is not saved coverage.
    """
    from tune_model.package.coverage import cover
    from tune_model.package.identity import identify
    from tune_model.pipeline.demand import asked_by_servers
    from tune_model.pipeline.report.facts import Missing

    model = identify(artifact.manifest.name, artifact.manifest.request)
    return [
        Missing(p.phase, " ".join(f"{k}={v}" for k, v in p.sizes.items()), p.runs, p.near, p.miss, p.nearest)
        for p in cover(artifact, asked_by_servers(paths, model))
        if not p.covered
    ]


def read_steps(path: Path) -> Mapping[str, "Sequence[StepTime]"]:
    """Return whole steps by grid point from a benchmark's result, the tuned model first.

    Raises:
        TuneModelError: The file is no result of `tune-model bench`.
    """
    from tune_model.pipeline.bench.result import read_result
    from tune_model.pipeline.report.facts import StepTime
    from tune_model.runtime.errors import TuneModelError

    steps: dict[str, list[StepTime]] = {}
    for row in read_result(path).rows:
        try:
            phase, *sizes = str(row["point"]).split()
            step = StepTime(str(row["name"]), float(row["median_ms"]), float(row["low_ms"]), float(row["high_ms"]))
        except (KeyError, TypeError, ValueError) as error:
            msg = f"{path}: a row lacks point, name, median_ms, low_ms or high_ms; expected what `bench --save` wrote"
            raise TuneModelError(msg) from error
        steps.setdefault(" ".join([phase, *sorted(sizes)]), []).append(step)
    for found in steps.values():
        found.sort(key=lambda step: step.name != "tuned")
    return steps


def _format_of(output: str | None) -> str:
    suffix = Path(output or "").suffix.removeprefix(".")
    return suffix if suffix in _FORMATS else "md" if suffix == "markdown" else "html"
