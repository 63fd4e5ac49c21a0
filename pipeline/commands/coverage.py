"""`tune-model coverage ARTIFACT`: what a deployment will ask for and the artifact lacks."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from tune_model.pipeline.options import artifact_argument, part_option, set_option
from tune_model.runtime.errors import TuneModelError

if TYPE_CHECKING:
    from rich.console import Console

    from tune_model.package.coverage import Asked, PointCoverage
    from tune_model.package.read import Artifact, ChoosePart
    from tune_model.pipeline.config import LoadedConfig

__all__ = ["OtherModelError", "command"]

EXIT_LACKING = 4

HELP = """List sizes that a deployment will ask for and ARTIFACT is not tuned at, each with the nearest entry.

What will be asked for comes from a configuration's grid, or from what servers ran: `tuned.coverage().save(FILE)` writes
it. Every step is looked up by the runtime's own rule: at a tuned size its winner runs; at another the nearest winner
that is legal there (near); else the step's own operators (plain). Runs nothing.

\b
  tune-model coverage llama-3-8b.tuned                             the grid it was tuned for
  tune-model coverage llama-3-8b.tuned --config next.yaml --strict  before a deployment: exits 4 if a size lacks
  tune-model coverage llama-3-8b.tuned --misses coverage.json      what a server ran
  tune-model llama-3-8b.yaml --add-misses coverage.json            tune these sizes too
"""


class OtherModelError(TuneModelError):
    """The configuration is of another model than the artifact."""


@click.command("coverage", help=HELP)
@artifact_argument
@part_option
@click.option("--config", "config_path", metavar="CONFIG.yaml", default=None, help="Ask for this workload's grid.")
@set_option
@click.option(
    "--misses", metavar="FILE", multiple=True, help="Ask for what a server ran: its coverage().save(FILE); repeatable."
)
@click.option("--strict", is_flag=True, help="Exit with 4 when anything is not tuned at exactly its sizes.")
@click.option("--json", "as_json", is_flag=True, help="Print every size asked for as JSON.")
def command(  # noqa: PLR0913, PLR0917 - one parameter per option
    artifact_path: str,
    part: "ChoosePart | None",
    config_path: str | None,
    overrides: tuple[str, ...],
    misses: tuple[str, ...],
    strict: bool,
    as_json: bool,
) -> int:
    """Open, ask, print."""
    import msgspec

    from tune_model.package.coverage import cover
    from tune_model.package.read import open_artifact
    from tune_model.pipeline.console import console

    if overrides and config_path is None:
        raise click.UsageError("--set changes a configuration; give one with --config")
    artifact = open_artifact(artifact_path, part)
    points = list(cover(artifact, asked(artifact, config_path, overrides, [Path(path) for path in misses])))
    if as_json:
        click.echo(msgspec.json.format(msgspec.json.encode(points)).decode())
    else:
        print_coverage(artifact_path, points, console())
    lacking = any(not point.covered for point in points)
    return EXIT_LACKING if strict and lacking else 0


def asked(
    artifact: "Artifact", config_path: str | None, overrides: tuple[str, ...], misses: Sequence[Path]
) -> "list[Asked]":
    """Return the sizes to ask for; without a configuration and misses those of the artifact's own grid.

    Raises:
        OtherModelError: The configuration is of another model.
        ConfigError: It is wrong.
        OtherWorkloadError: Saved coverage is of another model.
        CoverageFileError: A file is not saved coverage.
    """
    from tune_model.package.identity import identify
    from tune_model.pipeline.config import load_config
    from tune_model.pipeline.demand import asked_by_phases, asked_by_servers
    from tune_model.pipeline.request import phases_of

    found: list[Asked] = []
    if config_path is not None:
        loaded = load_config(config_path, overrides)
        _check_model(artifact, loaded)
        found += asked_by_phases(phases_of(loaded.config.workload))
    elif not misses:
        found += asked_by_phases(artifact.manifest.request.phases)
    manifest = artifact.manifest
    return [*found, *asked_by_servers(misses, identify(manifest.name, manifest.request))]


def _check_model(artifact: "Artifact", loaded: "LoadedConfig") -> None:
    """Refuse a configuration of another model, as far as the two say; the model itself need not be here."""
    from tune_model.package.contents import portable_request
    from tune_model.pipeline.request import ModelNotFoundError, make_request

    have = artifact.manifest.request
    config = loaded.config
    facts: list[tuple[tuple[str, ...], object, object]] = [
        (("dtype",), config.dtype or have.dtype, have.dtype),  # a saved program has its own
        (("task",), config.task, have.task),
        (("workload", "max_length"), config.workload.max_length or 0, have.max_length),
    ]
    try:
        wanted = portable_request(make_request(config, loaded.folder))
        facts.append((("model",), wanted.source, have.source))
    except (ModelNotFoundError, OSError):
        pass  # Then names and dtypes are all there is to compare.
    for path, ours, theirs in facts:
        if ours != theirs:
            other = path == ("model",)
            expected = "the artifact's" if other else f"{theirs}, as the artifact was tuned for"
            raise OtherModelError(str(loaded.error(path, expected, "is another model" if other else None)))


def print_coverage(path: str, points: "Sequence[PointCoverage]", out: "Console") -> None:
    """Print what lacks, each size with its steps and what runs there."""
    from rich.table import Table

    lacking = [point for point in points if not point.covered]
    if lacking:
        table = Table(title="not tuned at just these sizes", title_justify="left")
        for name in ("phase", "sizes", "runs", "exact", "near", "plain", "nearest entry"):
            right = name in {"runs", "exact", "near", "plain"}
            table.add_column(name, justify="right" if right else "left", overflow="fold")
        for point in lacking:
            sizes = " ".join(f"{name}={value}" for name, value in point.sizes.items())
            counts = [str(n) for n in (point.exact, point.near, point.miss)]
            runs = str(point.runs) if point.runs else "-"
            table.add_row(point.phase, sizes, runs, *counts, point.refused or point.nearest or "none")
        out.print(table)
        for line in _reasons(lacking):
            out.print(line, markup=False, soft_wrap=True)
    out.print(f"{path}: {len(points)} sizes asked for, {len(lacking)} not tuned", markup=False, soft_wrap=True)


def _reasons(points: "Sequence[PointCoverage]") -> list[str]:
    """Say once for each form and shape that runs plain operators why no kernel is legal there."""
    lines: dict[str, None] = {}
    for point in points:
        for row in point.lacking:
            if row.outcome == "miss":
                why = row.reasons[0] if row.reasons else "nothing is tuned for it"
                lines[f"plain: {row.label} at {row.dims}: {why}"] = None
    return list(lines)
