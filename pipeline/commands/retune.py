"""`tune-model retune ARTIFACT`: tune again from an artifact alone, without the model."""

from pathlib import Path
from typing import TYPE_CHECKING

import click

from tune_model.pipeline.options import artifact_argument, effort_option, part_option, sign_option

if TYPE_CHECKING:
    from tune_model.package.contents import ArtifactContents
    from tune_model.package.read import Artifact, ChoosePart
    from tune_model.package.signature import Signer
    from tune_model.pipeline.config import Config
    from tune_model.tune.choice import Tuning

__all__ = ["command"]

HELP = """Tune the programs of ARTIFACT again on this machine and write a new artifact. The model is not needed.

For a new GPU, driver or torch: the programs, the tasks and the configuration are inside the artifact, so neither the
model's folder nor its code nor a trace is. Everything is raced as `tune` races it; what the records already hold for
this machine is not measured again, so on the machine it came from, with its records, the result is the same bytes.

\b
  tune-model retune llama-3-8b.tuned                        writes llama-3-8b.retuned.tuned
  tune-model retune llama-3-8b.tuned -o llama-3-8b.h100.tuned --effort thorough
  tune-model diff llama-3-8b.tuned llama-3-8b.retuned.tuned
  tune-model merge llama-3-8b.tuned llama-3-8b.h100.tuned -o llama-3-8b.both.tuned

Exits as `tune` does: 0 when done, 3 when some tasks failed or the budget ended first, 130 after Ctrl-C.
"""


@click.command("retune", help=HELP)
@artifact_argument
@part_option
@click.option("-o", "--output", metavar="PATH", default=None, help="The artifact; NAME.retuned.tuned by default.")
@click.option(
    "--target",
    type=click.Choice(["same", "auto", "cpu", "cuda"]),
    default="same",
    show_default=True,
    help="The kind of machine it was tuned for, or another kind.",
)
@effort_option
@click.option("--budget", metavar="TIME", default=None, help="Longest time to tune: 90s, 10m, 2h.")
@click.option("--records", "store_path", metavar="FOLDER", default=None, help="Records and kernels live here.")
@click.option("--recheck", is_flag=True, help="Measure again what the records already hold.")
@sign_option
@click.option("--json", "as_json", is_flag=True, help="Print one JSON event per line instead of progress.")
def command(  # noqa: PLR0913, PLR0917 - one parameter per option
    artifact_path: str,
    part: "ChoosePart | None",
    output: str | None,
    target: str,
    effort: str | None,
    budget: str | None,
    store_path: str | None,
    recheck: bool,
    signer: "Signer | None",
    as_json: bool,
) -> int:
    """Open, take the plan out, tune, write."""
    from tune_model.package.output import check_output
    from tune_model.package.read import open_artifact
    from tune_model.package.replan import plan_of
    from tune_model.pipeline.console import console
    from tune_model.pipeline.environment import read_environment, unset_spinning
    from tune_model.pipeline.progress import make_report
    from tune_model.pipeline.store import check_store
    from tune_model.pipeline.tuning import finish, tune_options
    from tune_model.tune.building.trial import require_compiler
    from tune_model.tune.machine.probe import probe_target
    from tune_model.tune.tuner import tune

    unset_spinning()
    artifact = open_artifact(artifact_path, part)
    place = output or f"{artifact.manifest.name}.retuned.tuned"
    check_output(place)
    store = Path(store_path) if store_path else read_environment().cache_dir
    check_store(store)
    config, text = stored_config(artifact, effort, budget, target)
    plan = plan_of(artifact)
    machine = probe_target(_kind(artifact) if target == "same" else target)
    require_compiler(machine)
    console(error=True).print(f"target: {machine.name}", markup=False)
    with make_report(as_json=as_json) as report:
        tuning = tune(plan, machine, tune_options(config, store, recheck=recheck), report)
    return finish(_contents(artifact, tuning, text), place, as_json=as_json, signer=signer)


def stored_config(
    artifact: "Artifact", effort: str | None, budget: str | None, target: str = "same"
) -> "tuple[Config, str]":
    """Return the artifact's configuration with the command's options over it, and its text, unchanged without any.

    Raises:
        ConfigError: The artifact's configuration is of another version, or an option is wrong.
    """
    from tune_model.pipeline.config import dump_config, parse_config, parse_override
    from tune_model.pipeline.options import given_fields

    overrides = list(given_fields((), effort, budget))
    if target != "same":
        overrides.append(parse_override(f"target={target}", f"--target {target}"))
    name = f"{artifact.path}: config.yaml"
    config = parse_config(artifact.config(), name, overrides)
    return config, dump_config(config) if overrides else artifact.config()


def _kind(artifact: "Artifact") -> str:
    from tune_model.tune.target import CudaTarget

    return "cuda" if isinstance(artifact.manifest.target, CudaTarget) else "cpu"


def _contents(artifact: "Artifact", tuning: "Tuning", config_yaml: str) -> "ArtifactContents":
    from tune_model.package.contents import ArtifactContents

    manifest = artifact.manifest
    return ArtifactContents(
        name=manifest.name,
        request=manifest.request,
        tuning=tuning,
        constants=artifact.constants(),
        config_yaml=config_yaml,
        architecture=manifest.model.architecture,
        weights=artifact.weights(),
    )
