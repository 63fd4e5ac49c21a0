"""`tune-model CONFIG`: trace, tune, package."""

import os
from pathlib import Path
from typing import TYPE_CHECKING

import click

from tune_model.pipeline.options import config_argument, effort_option, set_option, with_effort
from tune_model.runtime.errors import TuneModelError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from tune_model.extract.request import Request
    from tune_model.package.contents import ArtifactContents
    from tune_model.pipeline.config import LoadedConfig
    from tune_model.tune.choice import Tuning

__all__ = ["command"]

HELP = """Tune the model of CONFIG for its target and write one deployment artifact.

\b
  tune-model llama-3-8b.yaml                        a shipped configuration, on this machine
  tune-model my-model.yaml -o my-model.tuned        your own
  tune-model my-model.yaml --effort thorough --budget 30m
  tune-model my-model.yaml --set target=cpu --set workload.forward.batch=[1,4]

The model is traced without weights. Every distinct matmul, reduction, attention and pointwise chain of the workload is
raced on this machine: the vendor library stays wherever nothing beats it beyond the noise. Every measurement is kept in
a records database, so running the command again continues where it stopped and a finished race is never run twice.
"""


@click.command("tune", help=HELP)
@config_argument
@click.option(
    "-o", "--output", "output_path", metavar="PATH", default=None, help="The artifact; NAME.tuned by default."
)
@set_option
@effort_option
@click.option("--budget", metavar="TIME", default=None, help="Longest time to tune: 90s, 10m, 2h.")
@click.option("--records", "records_path", metavar="FOLDER", default=None, help="Records and kernels live here.")
@click.option("--recheck", is_flag=True, help="Measure again what the records already hold.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON event per line instead of progress.")
def command(  # noqa: PLR0913, PLR0917 - one parameter per option
    config_path: str,
    output_path: str | None,
    overrides: tuple[str, ...],
    effort: str | None,
    budget: str | None,
    records_path: str | None,
    recheck: bool,
    as_json: bool,
) -> int:
    """Conduct the rooms."""
    from tune_model.extract.plan import extract
    from tune_model.package.output import check_output
    from tune_model.package.write import write_artifact
    from tune_model.pipeline.config import budget_seconds, load_config
    from tune_model.pipeline.console import console, size_text
    from tune_model.pipeline.environment import read_environment
    from tune_model.pipeline.progress import make_report
    from tune_model.pipeline.request import make_request
    from tune_model.pipeline.scoreboard import print_scoreboard
    from tune_model.tune.candidate import Effort
    from tune_model.tune.options import TuneOptions
    from tune_model.tune.probe import probe_target
    from tune_model.tune.tuner import tune

    texts = overrides if budget is None else (*overrides, f"search.budget={budget}")
    loaded = load_config(config_path, with_effort(texts, effort))
    config = loaded.config
    output = output_path or config.output.path or f"{config.name}.tuned"
    check_output(output)
    say = console(error=True)
    target = probe_target(config.target)
    say.print(f"target: {target.name}", markup=False)
    request = make_request(config, loaded.folder)
    extraction = extract(request)
    for program in extraction.plan.programs:
        say.print(
            f"traced {program.name}: {len(program.steps)} steps, {len(program.forms)} distinct regions", markup=False
        )
    store = Path(records_path) if records_path else read_environment().cache_dir
    options = TuneOptions(
        effort=Effort(config.search.effort),
        budget_s=budget_seconds(config),
        seed=config.search.seed,
        records_path=store / "records.sqlite",
        kernels_path=store / "kernels",
        recheck=recheck,
        build_workers=os.cpu_count() or 1,
    )
    with make_report(as_json=as_json) as report:
        tuning = tune(extraction.plan, target, options, report)
    contents = _contents(loaded, request, tuning, extraction.constants)
    place = write_artifact(output, contents)
    if not as_json:
        print_scoreboard(tuning, console())
    say.print(f"wrote {place} ({size_text(_size(place))})", markup=False)
    return exit_code(tuning)


EXIT_PARTIAL = 3
EXIT_INTERRUPTED = 130


def exit_code(tuning: "Tuning") -> int:
    """Return 0 when every task was searched, 3 when some failed or the budget ended first, 130 after Ctrl-C."""
    if tuning.stopped == "interrupted":
        return EXIT_INTERRUPTED
    complete = all(choice.status in {"tuned", "no gain", "layout", "disturbed"} for choice in tuning.choices)
    return 0 if complete and not tuning.stopped else EXIT_PARTIAL


def _contents(
    loaded: "LoadedConfig", request: "Request", tuning: "Tuning", constants: "Mapping[str, Tensor]"
) -> "ArtifactContents":
    from tune_model.package.contents import ArtifactContents
    from tune_model.pipeline.config import dump_config

    config = loaded.config
    return ArtifactContents(
        name=config.name,
        request=request,
        tuning=tuning,
        constants=constants,
        config_yaml=dump_config(config),
        architecture=getattr(config.model, "architecture", None),
        weights=_embedded(request, tuning) if config.output.weights == "embed" else None,
    )


def _embedded(request: "Request", tuning: "Tuning") -> "Mapping[str, Tensor]":
    from tune_model.extract.request import TransformersSource
    from tune_model.runtime.weights import read_sources

    folder = request.source.folder if isinstance(request.source, TransformersSource) else None
    if folder is None:
        msg = "$.output.weights is embed, but the model comes without weights; give $.model.path or use external"
        raise TuneModelError(msg)
    return read_sources(tuning.plan.programs, Path(folder))


def _size(place: Path) -> int:
    files = [place] if place.is_file() else [path for path in place.rglob("*") if path.is_file()]
    return sum(path.stat().st_size for path in files)
