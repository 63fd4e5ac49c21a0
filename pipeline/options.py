"""Options that several commands share, so that they read and behave alike."""

from pathlib import Path

import click

from tune_model.pipeline.config import Override, parse_override

__all__ = ["artifact_argument", "config_argument", "effort_option", "set_option", "weights_option", "with_effort"]

config_argument = click.argument("config_path", metavar="CONFIG.yaml")
artifact_argument = click.argument("artifact_path", metavar="ARTIFACT")
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


def _weights_path(_ctx: click.Context, _parameter: click.Parameter, value: str | None) -> str | None:
    from tune_model.pipeline.request import model_folder

    return None if value is None else str(model_folder(value, Path.cwd()))


weights_option = click.option(
    "--weights",
    "weights_path",
    metavar="PATH",
    default=None,
    callback=_weights_path,
    help="Folder or file of safetensors, or package:NAME/FOLDER; without it the model's own, or seeded random ones.",
)


def with_effort(overrides: tuple[str, ...], effort: str | None) -> tuple[Override, ...]:
    """Parse the values of `--set` and add `--effort` to them."""
    texts = overrides if effort is None else (*overrides, f"search.effort={effort}")
    return tuple(parse_override(text) for text in texts)
