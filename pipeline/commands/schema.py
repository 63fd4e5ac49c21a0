"""`tune-model schema`: the configuration's JSON Schema."""

import json

import click

from tune_model.pipeline.config import json_schema

__all__ = ["command"]

HELP = """Print the JSON Schema of a configuration file.

Every field comes with its type, its default and what it means. For completion and checks in an editor:

\b
  tune-model schema > tune-model.schema.json
  # and as the first line of my-model.yaml:
  # yaml-language-server: $schema=tune-model.schema.json
"""


@click.command("schema", help=HELP)
def command() -> None:
    """Print the schema."""
    click.echo(json.dumps(json_schema(), indent=2))
