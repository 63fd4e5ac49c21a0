"""`tune-model plan`: what would be tuned, without tuning and without a GPU."""

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import msgspec

from tune_model.pipeline.options import config_argument, effort_option, set_option

if TYPE_CHECKING:
    from tune_model.extract.task import Plan
    from tune_model.tune.estimate import Estimate
    from tune_model.tune.target import Target

__all__ = ["command"]

HELP = """Show what tuning CONFIG would do: programs, tasks, candidates and an estimate of the time.

The model is traced without weights, so this needs neither a GPU nor memory for the model.

\b
  tune-model plan llama-3-8b.yaml
  tune-model plan llama-3-8b.yaml --set target=cuda:sm_90 --json
"""


@click.command("plan", help=HELP)
@config_argument
@set_option
@effort_option
@click.option("--json", "as_json", is_flag=True, help="Print JSON: programs, tasks, rivals, skipped steps, notes.")
def command(config_path: str, overrides: tuple[str, ...], effort: str | None, as_json: bool) -> None:
    """Trace, group and print."""
    from tune_model.pipeline.config import load_config
    from tune_model.pipeline.extraction import extract_configured
    from tune_model.pipeline.options import given_fields
    from tune_model.runtime.errors import TuneModelError
    from tune_model.tune.machine.probe import planned_target

    loaded = load_config(config_path, given_fields(overrides, effort))
    try:
        target, assumed = planned_target(loaded.config.target)
    except TuneModelError as error:
        raise loaded.place(error, ("target",)) from error
    _, extraction = extract_configured(loaded)
    plan = extraction.plan
    notes = plan.notes if assumed is None else (*plan.notes, assumed)
    plan = msgspec.structs.replace(plan, notes=notes)
    cost = plan_cost(plan, target, loaded.config.search.effort)
    if as_json:
        import json

        click.echo(json.dumps(as_document(plan, target, cost), indent=1))
    else:
        print_plan(plan, target, cost, Path(config_path).name)


def plan_cost(plan: "Plan", target: "Target", effort: str) -> "Estimate":
    """Count each task's candidates at an effort, building none, and guess the time on this many processors."""
    from tune_model.tune.candidate import Effort
    from tune_model.tune.estimate import estimate
    from tune_model.tune.families import families_for

    return estimate(plan, target, families_for(target), Effort(effort), len(os.sched_getaffinity(0)))


def as_document(plan: "Plan", target: "Target", cost: "Estimate") -> dict[str, Any]:
    """Return the plan's facts as JSON-ready data."""
    from tune_model.runtime.program import Apply

    counts = {task.task: task.candidates for task in cost.tasks}
    own = {task.key for task in plan.tasks}
    return {
        "target": target.name,
        "estimate_s": round(cost.seconds, 1),
        "programs": [
            {
                "name": program.name,
                "steps": len(program.steps),
                "regions": sum(isinstance(step, Apply) for step in program.steps),
                "forms": len(program.forms),
                "weights": len(program.weights),
            }
            for program in plan.programs
        ],
        "tasks": [
            {
                "key": planned.key,
                "label": planned.label,
                "kind": planned.task.form.kind,
                "weight": planned.weight,
                "occurrences": sum(site.occurrences for site in planned.sites),
                "points": [dict(site.point) | {"program": site.program} for site in planned.sites],
                "flops": planned.flops,
                "size_bytes": planned.size_bytes,
                "candidates": counts[planned.key],
            }
            for planned in plan.tasks
        ],
        "rivals": [
            {"what": rival.what, "tasks": [task.label for task in rival.plan.tasks if task.key not in own]}
            for rival in plan.rivals
        ],
        "skipped": [{"program": s.program, "op": s.op, "count": s.count, "reason": s.reason} for s in plan.skipped],
        "notes": list(plan.notes),
    }


def print_plan(plan: "Plan", target: "Target", cost: "Estimate", title: str) -> None:
    """Print programs, tasks and what stays as it is."""
    from rich.table import Table

    from tune_model.pipeline.console import console, size_text

    out = console()
    document = as_document(plan, target, cost)
    for program in document["programs"]:
        out.print(
            f"[bold]{program['name']}[/]: {program['steps']} steps, {program['regions']} tunable regions of "
            f"{program['forms']} forms, {program['weights']} weights"
        )
    candidates = sum(task.candidates for task in cost.tasks)
    table = Table(title=f"{title}: {len(plan.tasks)} tasks, {candidates} candidates", title_justify="left")
    for name in ("task", "runs", "weight", "GFLOP", "bytes", "candidates"):
        table.add_column(name, justify="left" if name == "task" else "right", overflow="fold")
    for task in document["tasks"]:
        table.add_row(
            task["label"],
            str(task["occurrences"]),
            f"{task['weight']:.3g}",
            f"{task['flops'] / 1e9:.3g}",
            size_text(task["size_bytes"]),
            str(task["candidates"]),
        )
    out.print(table)
    for rival in document["rivals"]:
        more = f"{len(rival['tasks'])} task{'' if len(rival['tasks']) == 1 else 's'} more"
        out.print(f"races too: {rival['what']} ({more})", markup=False)
    if plan.skipped:
        skipped = Table(title="not tuned (run as ATen calls)", title_justify="left")
        for name in ("program", "op", "count", "reason"):
            skipped.add_column(name, overflow="fold")
        for entry in plan.skipped:
            skipped.add_row(entry.program, entry.op, str(entry.count), entry.reason)
        out.print(skipped)
    out.print(
        f"about {cost.seconds:.0f} s to tune for {target.name} with {len(os.sched_getaffinity(0))} processors building",
        markup=False,
    )
    for note in plan.notes:
        out.print(f"note: {note}", markup=False)
