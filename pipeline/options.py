"""Options that several commands share, so that they read and behave alike."""

from pathlib import Path
from typing import TYPE_CHECKING

import click

from tune_model.pipeline.config import Override, parse_override
from tune_model.runtime.errors import TuneModelError

if TYPE_CHECKING:
    from tune_model.package.read import ChoosePart
    from tune_model.package.signature import Signer, VerifyKey

__all__ = [
    "artifact_argument",
    "artifact_path",
    "config_argument",
    "effort_option",
    "given_fields",
    "part_option",
    "set_option",
    "sign_option",
    "verify_key_option",
    "weights_option",
]

config_argument = click.argument("config_path", metavar="CONFIG.yaml")
set_option = click.option(
    "--set",
    "overrides",
    multiple=True,
    metavar="A.B=C",
    help="Override one field of the configuration, e.g. --set target=cpu --set workload.decode.batch=[1,4].",
)
effort_option = click.option(
    "--effort",
    type=click.Choice(["quick", "balanced", "thorough"]),
    default=None,
    help="How much of the space is searched; overrides search.effort.",
)


def artifact_path(_ctx: click.Context, _parameter: click.Parameter, value: str) -> str:
    """Check that something is where an argument says an artifact is; what it is, opening it tells."""
    if not Path(value).exists():
        raise click.BadParameter(f"{value} does not exist; expected an artifact that tune-model wrote")
    return value


def _weights_path(_ctx: click.Context, _parameter: click.Parameter, value: str | None) -> str | None:
    """Find the weights, and read the headers of their files: what cannot be used is said before anything runs."""
    from tune_model.pipeline.request import model_folder
    from tune_model.runtime.weights.checkpoint import open_checkpoint

    if value is None:
        return None
    try:
        folder = model_folder(value, Path.cwd())
        open_checkpoint(folder)
    except TuneModelError as error:
        raise click.BadParameter(str(error)) from error
    return str(folder)


def _part(_ctx: click.Context, _parameter: click.Parameter, value: str | None) -> "ChoosePart | None":
    from tune_model.package.parts import named_part

    return None if value is None else named_part(value)


def _signer(_ctx: click.Context, _parameter: click.Parameter, value: str | None) -> "Signer | None":
    from tune_model.package.signature import read_signing_key

    return None if value is None else read_signing_key(value)


def _verify_key(_ctx: click.Context, _parameter: click.Parameter, value: str | None) -> "VerifyKey | None":
    from tune_model.package.signature import read_verify_key

    return None if value is None else read_verify_key(value)


artifact_argument = click.argument("artifact_path", metavar="ARTIFACT", callback=artifact_path)
part_option = click.option(
    "--part",
    metavar="NAME",
    default=None,
    callback=_part,
    help="Of a bundle: cpu, cuda, sm_90, part of a machine's name or of a digest; by default this machine's.",
)
weights_option = click.option(
    "--weights",
    "weights_path",
    metavar="PATH",
    default=None,
    callback=_weights_path,
    help="Folder or file of safetensors, or package:NAME/FOLDER; without it the model's own, or seeded random ones.",
)


sign_option = click.option(
    "--sign",
    "signer",
    metavar="KEY",
    default=None,
    callback=_signer,
    help="Sign the artifact with this ed25519 private key (PEM).",
)
verify_key_option = click.option(
    "--verify-key",
    "verify_key",
    metavar="KEY",
    default=None,
    callback=_verify_key,
    help="Refuse what is not signed by this ed25519 public key (PEM), or was changed afterwards.",
)


def given_fields(overrides: tuple[str, ...], effort: str | None, budget: str | None = None) -> tuple[Override, ...]:
    """Parse the values of `--set`, and add `--effort` and `--budget` to them."""
    given = [parse_override(text) for text in overrides]
    for name, value in (("effort", effort), ("budget", budget)):
        if value is not None:
            given.append(parse_override(f"search.{name}={value}", f"--{name} {value}"))
    return tuple(given)
