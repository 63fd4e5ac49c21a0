"""`tune-model inspect ARTIFACT`: what is inside, without running any of it."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import click

from tune_model.pipeline.options import artifact_argument, part_option, verify_key_option

if TYPE_CHECKING:
    from rich.console import Console

    from tune_model.package.inspect import ArtifactFacts
    from tune_model.package.read import Artifact, ChoosePart
    from tune_model.package.signature import VerifyKey
    from tune_model.pipeline.report.facts import TaskFacts

__all__ = ["command"]

HELP = """Show what is inside ARTIFACT: programs, winners and their measured times, kernels, memory, target.

Reads and checks the files; loads no kernel, needs no GPU and no weights. Of a bundle it lists the parts.

\b
  tune-model inspect llama-3-8b.tuned
  tune-model inspect llama-3-8b.tuned --json | jq '.tasks[0]'
  tune-model inspect llama-3-8b.tuned --footprints "rms_norm 1x4096"
  tune-model inspect llama-3-8b.both.tuned --part sm_90
"""


@click.command("inspect", help=HELP)
@artifact_argument
@part_option
@click.option(
    "--footprints",
    "task",
    metavar="TASK",
    default=None,
    help="Show how one task's race went, step by step: part of its name, or the beginning of its key.",
)
@verify_key_option
@click.option("--json", "as_json", is_flag=True, help="Print all facts as JSON; of a bundle, a list with each part's.")
def command(
    artifact_path: str,
    part: "ChoosePart | None",
    task: str | None,
    verify_key: "VerifyKey | None",
    as_json: bool,
) -> None:
    """Open, describe, print."""
    import msgspec

    from tune_model.package.inspect import describe
    from tune_model.package.read import open_artifact, open_parts
    from tune_model.pipeline.console import console

    if task is not None:
        found = find_task(open_artifact(artifact_path, part, verify_key), task)
        if as_json:
            click.echo(msgspec.json.format(msgspec.json.encode(found)).decode())
        else:
            print_race(found, console())
        return
    parts = open_parts(artifact_path, verify_key)
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


def find_task(artifact: "Artifact", text: str) -> "TaskFacts":
    """Return the one task that a text means: part of its label, or the beginning of its key.

    Raises:
        click.BadParameter: None is meant, or several.
    """
    from tune_model.pipeline.report.gather import gather
    from tune_model.pipeline.report.source import from_artifact

    tasks = gather(from_artifact(artifact)).tasks
    exact = [task for task in tasks if text in (task.label, task.key)]
    found = exact or [task for task in tasks if text.lower() in task.label.lower() or task.key.startswith(text)]
    if len(found) == 1:
        return found[0]
    names = [task.label for task in (found or tasks)]
    listed = "; ".join(names[:8]) + (f"; and {len(names) - 8} more" if len(names) > 8 else "")
    problem = f"means {len(found)} tasks" if found else "means no task"
    raise click.BadParameter(f"{text!r} {problem}; expected one of: {listed}", param_hint="--footprints")


def print_race(task: "TaskFacts", out: "Console") -> None:
    """Print how a task was raced: its descents step by step, then every candidate in the order timed."""
    from rich.table import Table

    from tune_model.pipeline.console import gain_text, time_text

    out.print(
        f"{task.label} ({task.key}): {task.winner}, {time_text(task.after_us)}, plain operators "
        f"{time_text(task.before_us)}, {gain_text(task.before_us, task.after_us)} ({task.status})",
        markup=False,
        soft_wrap=True,
    )
    if task.footprints:
        steps = Table(title="footprints", title_justify="left")
        for name in ("climb", "stood on", "time", "tried", "went"):
            steps.add_column(name, justify="right" if name in {"time", "tried"} else "left", overflow="fold")
        for step in task.footprints:
            time = time_text(step.at_us) if step.at_us else "out"
            tried = f"{step.tried} {step.around}"
            steps.add_row(f"{step.family} {step.descent + 1}", step.at, time, tried, step.moved or "stays")
        out.print(steps)
    else:
        out.print("raced from a list, not climbed", markup=False)
    table = Table(title="in the order timed", title_justify="left")
    for name in ("candidate", "race", "final", "again", ""):
        table.add_column(name, justify="left" if name in {"candidate", ""} else "right", overflow="fold")
    for candidate in task.race:
        race = ", ".join(time_text(us) for us in candidate.race_us)
        later = [time_text(us) if us is not None else "" for us in (candidate.final_us, candidate.guard_us)]
        table.add_row(candidate.label, race, *later, "disturbed" if candidate.disturbed else "")
    out.print(table)
    rejected = ", ".join(f"{count} {reason}" for reason, count in task.rejected.items())
    if rejected:
        out.print(f"rejected: {rejected}", markup=False, soft_wrap=True)


def print_parts(path: str, parts: Sequence["ArtifactFacts"], out: "Console") -> None:
    """List a bundle's parts, in the order in which they are preferred."""
    from rich.table import Table

    from tune_model.pipeline.console import count_text, size_text

    out.print(
        f"{path}: a bundle of {count_text(len(parts), 'part')} of {parts[0].name}; look into one with --part",
        markup=False,
    )
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

    from tune_model.pipeline.console import gain_text, memory_text, size_text, time_text

    out.print(
        f"{facts.name}: {facts.architecture or 'model'} ({facts.task}, {facts.dtype}), "
        f"{facts.parameters / 1e6:.4g} M parameters, weights {facts.weights} ({size_text(facts.weight_bytes)})\n"
        f"tuned on {facts.target} by tune-model {facts.tune_model}, schema {facts.schema}\n"
        f"digest {facts.digest}, {size_text(facts.size_bytes)}, "
        f"{'signed by ' + facts.signed_by if facts.signed_by else 'not signed'}",
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
    out.print(f"\nserved: {memory_text(facts.memory)}", markup=False)
    table = Table(title="tasks", title_justify="left")
    for name in ("task", "winner", "time", "extern", "speedup", "share", "timed", "status"):
        table.add_column(name, justify="left" if name in {"task", "winner", "status"} else "right", overflow="fold")
    for task in facts.tasks:
        table.add_row(
            task.label,
            task.winner,
            time_text(task.median_us),
            time_text(task.baseline_us),
            "-" if task.status == "disturbed" else f"{task.speedup:.2f}x",
            "-" if task.status == "disturbed" else f"{task.share:.1%}",
            str(task.measured),
            task.status,
        )
    out.print(table)
    disturbed = sum(task.status == "disturbed" for task in facts.tasks)
    if disturbed:
        out.print(
            f"{disturbed} tasks keep the library because other processes disturbed their times; tune again with "
            "--recheck on an idle machine",
            soft_wrap=True,
        )
    for step in facts.steps:
        point = " ".join(f"{name}={value}" for name, value in step.point)
        out.print(
            f"{step.program} {point}: the whole step {time_text(step.median_us)}, with torch's operators "
            f"{time_text(step.baseline_us)}, {gain_text(step.baseline_us, step.median_us)} "
            f"({step.gain_low:.2f} to {step.gain_high:.2f})",
            markup=False,
            soft_wrap=True,
        )
    out.print(f"{len(facts.kernels)} kernels, {size_text(sum(k.size_bytes for k in facts.kernels))} of machine code")
