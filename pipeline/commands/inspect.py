"""`tune-model inspect ARTIFACT`: what is inside, without running any of it."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import click

from tune_model.pipeline.options import artifact_argument, part_option

if TYPE_CHECKING:
    from rich.console import Console

    from tune_model.package.inspect import ArtifactFacts
    from tune_model.package.read import ChoosePart

__all__ = ["command"]

HELP = """Show what is inside ARTIFACT: programs, winners and their measured times, kernels, memory, target.

Reads and checks the files; loads no kernel, needs no GPU and no weights. Of a bundle it lists the parts.

\b
  tune-model inspect llama-3-8b.tuned
  tune-model inspect llama-3-8b.tuned --json | jq '.tasks[0]'
  tune-model inspect llama-3-8b.both.tuned --part sm_90
"""


@click.command("inspect", help=HELP)
@artifact_argument
@part_option
@click.option("--json", "as_json", is_flag=True, help="Print all facts as JSON; of a bundle, a list with each part's.")
def command(artifact_path: str, part: "ChoosePart | None", as_json: bool) -> None:
    """Open, describe, print."""
    import msgspec

    from tune_model.package.inspect import describe
    from tune_model.package.read import open_parts
    from tune_model.pipeline.console import console

    parts = open_parts(artifact_path)
    if part is not None:
        parts = (part(parts),)
    facts = [describe(found) for found in parts]
    if as_json:
        shown = facts if len(facts) > 1 else facts[0]
        click.echo(msgspec.json.format(msgspec.json.encode(shown)).decode())
    elif len(facts) > 1:
        print_parts(artifact_path, facts, console())
    else:
        print_facts(facts[0], console())


def print_parts(path: str, parts: Sequence["ArtifactFacts"], out: "Console") -> None:
    """List a bundle's parts, in the order in which they are preferred."""
    from rich.table import Table

    from tune_model.pipeline.console import size_text

    out.print(f"{path}: a bundle of {len(parts)} parts of {parts[0].name}; look into one with --part", markup=False)
    table = Table()
    for name in ("tuned on", "digest", "tasks", "kernels", "size"):
        table.add_column(name, justify="right" if name in {"tasks", "kernels", "size"} else "left")
    for facts in parts:
        counts = str(len(facts.tasks)), str(len(facts.kernels))
        table.add_row(facts.target, facts.digest[:12], *counts, size_text(facts.size_bytes))
    out.print(table)


def print_facts(facts: "ArtifactFacts", out: "Console") -> None:
    """Print the facts for people."""
    from rich.table import Table

    from tune_model.pipeline.console import size_text, time_text

    out.print(
        f"{facts.name}: {facts.architecture or 'model'} ({facts.task}, {facts.dtype}), "
        f"{facts.parameters / 1e6:.4g} M parameters, weights {facts.weights} ({size_text(facts.weight_bytes)})\n"
        f"tuned on {facts.target} by tune-model {facts.tune_model}, schema {facts.schema}\n"
        f"digest {facts.digest}, {size_text(facts.size_bytes)}",
        markup=False,
    )
    for program in facts.programs:
        forms = ", ".join(f"{count} {kind}" for kind, count in program.forms.items())
        memory = program.memory
        point = " ".join(f"{name}={value}" for name, value in memory.point.items())
        out.print(
            f"\n{program.name}: {program.steps} steps ({forms}), {program.distinct_forms} distinct forms\n"
            f"  memory at {point}: weights {size_text(program.weight_bytes)}, cache {size_text(memory.caches)}, "
            f"activations at most {size_text(memory.activations)}",
            markup=False,
        )
    table = Table(title="tasks", title_justify="left")
    for name in ("task", "winner", "time", "extern", "speedup", "share", "timed", "status"):
        table.add_column(name, justify="left" if name in {"task", "winner", "status"} else "right", overflow="fold")
    for task in facts.tasks:
        table.add_row(
            task.label,
            task.winner,
            time_text(task.median_us),
            time_text(task.baseline_us),
            f"{task.speedup:.2f}x",
            f"{task.share:.1%}",
            str(task.measured),
            task.status,
        )
    out.print(table)
    out.print(f"{len(facts.kernels)} kernels, {size_text(sum(k.size_bytes for k in facts.kernels))} of machine code")
