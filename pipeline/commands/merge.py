"""`tune-model merge A B -o C`: one bundle for several machines, each natively tuned."""

from typing import TYPE_CHECKING

import click

from tune_model.pipeline.options import artifact_path, sign_option

if TYPE_CHECKING:
    from tune_model.package.signature import Signer

__all__ = ["command"]

HELP = """Merge artifacts of one model, each tuned on its own machine, into one bundle.

`tune_model.load` takes the part for the machine it runs on: one that was tuned on just such a machine if there is one,
else the one nearest to it that can run. What parts share (embedded weights, constants) is stored once. Parts stay as
they are, so their digests stay; the same parts give the same bytes. Runs nothing.

\b
  tune-model merge h100.tuned a100.tuned cpu.tuned -o llama-3-8b.tuned
  tune-model merge llama-3-8b.tuned b200.tuned -o llama-3-8b.tuned      add one to a bundle
  tune-model inspect llama-3-8b.tuned                                   lists the parts
  tune-model verify llama-3-8b.tuned                                    verifies this machine's
"""


def _paths(ctx: click.Context, parameter: click.Parameter, values: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(artifact_path(ctx, parameter, value) for value in values)


@click.command("merge", help=HELP)
@click.argument("paths", metavar="ARTIFACT...", nargs=-1, required=True, callback=_paths)
@click.option("-o", "--output", metavar="PATH", required=True, help="The bundle; a folder if it ends in a slash.")
@sign_option
def command(paths: tuple[str, ...], output: str, signer: "Signer | None") -> None:
    """Merge and list the parts."""
    from tune_model.package.merge import merge_artifacts
    from tune_model.package.parts import part_name
    from tune_model.pipeline.console import count_text

    parts = merge_artifacts(paths, output, signer=signer)
    for part in parts:
        click.echo(part_name(part.manifest))
    click.echo(f"wrote {output} ({count_text(len(parts), 'part')})", err=True)
