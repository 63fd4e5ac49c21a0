"""`tune-model CONFIG`: trace, tune, package."""

from pathlib import Path
from typing import TYPE_CHECKING

import click

from tune_model.pipeline.options import config_argument, effort_option, given_fields, set_option, sign_option
from tune_model.runtime.errors import TuneModelError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import Tensor

    from tune_model.extract.request import Request
    from tune_model.package.contents import ArtifactContents
    from tune_model.package.signature import Signer
    from tune_model.pipeline.config import LoadedConfig
    from tune_model.runtime.program import Program
    from tune_model.tune.choice import Tuning
    from tune_model.tune.target import Target

__all__ = ["command"]

HELP = """Tune the model of CONFIG for its target and write one deployment artifact.

\b
  tune-model llama-3-8b.yaml                        a shipped configuration, on this machine
  tune-model my-model.yaml -o my-model.tuned        your own
  tune-model my-model.yaml --effort thorough --budget 30m
  tune-model my-model.yaml --set target=cpu --set workload.forward.batch=[1,4]
  tune-model my-model.yaml --add-misses coverage.json  with the sizes that a server missed

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
@click.option("--records", "store_path", metavar="FOLDER", default=None, help="Records and kernels live here.")
@click.option("--recheck", is_flag=True, help="Measure again what the records already hold.")
@click.option(
    "--add-misses",
    "misses",
    metavar="FILE",
    multiple=True,
    help="Add to the workload the sizes that a server missed: what its coverage().save(FILE) wrote; repeatable.",
)
@sign_option
@click.option(
    "--save",
    "save_path",
    metavar="FILE",
    default=None,
    help="Write what tuning took and found as a benchmark result.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON event per line instead of progress.")
def command(  # noqa: PLR0913, PLR0917 - one parameter per option
    config_path: str,
    output_path: str | None,
    overrides: tuple[str, ...],
    effort: str | None,
    budget: str | None,
    store_path: str | None,
    recheck: bool,
    misses: tuple[str, ...],
    signer: "Signer | None",
    save_path: str | None,
    as_json: bool,
) -> int:
    """Conduct the rooms."""
    from tune_model.package.output import check_output
    from tune_model.pipeline.bench.result import check_result
    from tune_model.pipeline.config import load_config
    from tune_model.pipeline.console import console
    from tune_model.pipeline.demand import sizes_to_add
    from tune_model.pipeline.environment import read_environment, unset_spinning
    from tune_model.pipeline.extraction import extract_configured
    from tune_model.pipeline.progress import make_report
    from tune_model.pipeline.store import check_store
    from tune_model.pipeline.tuning import finish, tune_options
    from tune_model.tune.tuner import tune

    unset_spinning()
    if store_path == "":
        raise click.BadParameter("is empty; expected a folder", param_hint="--records")
    given = given_fields(overrides, effort, budget)
    loaded = load_config(config_path, given)
    added, more = sizes_to_add(loaded, [Path(path) for path in misses])
    if more:
        loaded = load_config(config_path, [*given, *more])
    config = loaded.config
    output = (config.output.path or f"{config.name}.tuned") if output_path is None else output_path
    check_output(output)
    if save_path is not None:
        if Path(save_path).resolve().is_relative_to(Path(output).resolve()):
            raise click.BadParameter("lies in the artifact; expected another place", param_hint="--save")
        check_result(Path(save_path))
    store = Path(store_path) if store_path else read_environment().cache_dir
    check_store(store)
    target = _measurable_target(loaded)
    say = console(error=True)
    say.print(f"target: {target.name}", markup=False)
    for one in added:
        say.print(f"added {one.phase}.{one.size} = {one.value}, run {one.runs} times by servers", markup=False)
    request, extraction = extract_configured(loaded)
    _check_weights(loaded, request, extraction.plan.programs)
    for program in extraction.plan.programs:
        say.print(
            f"traced {program.name}: {len(program.steps)} steps, {len(program.forms)} distinct regions", markup=False
        )
    with make_report(as_json=as_json) as report:
        tuning = tune(extraction.plan, target, tune_options(config, store, recheck=recheck), report)
    contents = _contents(loaded, request, tuning, extraction.constants)
    arguments = click.get_current_context().obj
    return finish(contents, output, as_json=as_json, signer=signer, save_path=save_path, arguments=arguments)


def _measurable_target(loaded: "LoadedConfig") -> "Target":
    """Return the machine to tune for, which must be this one: known before the model is traced."""
    from tune_model.tune.building.trial import require_compiler
    from tune_model.tune.machine.cuda import require_gpu
    from tune_model.tune.machine.probe import probe_target
    from tune_model.tune.target import CudaTarget

    try:
        target = probe_target(loaded.config.target)
        if isinstance(target, CudaTarget):
            require_gpu(target, 0)
        require_compiler(target)
    except TuneModelError as error:
        raise loaded.place(error, ("target",)) from error
    return target


def _check_weights(loaded: "LoadedConfig", request: "Request", programs: "Sequence[Program]") -> None:
    """Look at the weights that are to be embedded, before tuning; they are read after it."""
    from tune_model.runtime.weights.transforms import check_sources

    if loaded.config.output.weights != "embed":
        return
    folder = _weights_folder(request)
    if folder is None:
        expected = "external, since the model comes without weights; or give $.model.path"
        raise loaded.error(("output", "weights"), expected)
    try:
        check_sources(programs, folder)
    except TuneModelError as error:
        raise loaded.place(error, ("output", "weights")) from error


def _weights_folder(request: "Request") -> str | None:
    return getattr(request.source, "folder", None)


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
    from tune_model.runtime.weights.transforms import read_sources

    return read_sources(tuning.plan.programs, _weights_folder(request) or "")
