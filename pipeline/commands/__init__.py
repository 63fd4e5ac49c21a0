"""The subcommands, one file each.

To add one: write `commands/<name>.py` with a `command` (a `click.Command`) and add its line here. A command's file is
imported when the command runs, and imports torch, Triton and the heavy rooms inside its functions, so that
`tune-model --help` and usage errors answer at once.
"""

from typing import Final

__all__ = ["COMMANDS", "DEFAULT"]

# Name -> what it does, as `tune-model --help` prints it. The order here is the order there.
COMMANDS: Final = {
    "tune": "Tune a model and write its artifact (the default command).",
    "inspect": "Show what is inside an artifact, running none of it.",
    "report": "Write a report of an artifact: one page, Markdown or JSON.",
    "verify": "Check an artifact on this machine against its model.",
    "bench": "Time a tuned model beside eager and torch.compile.",
    "diff": "Compare two artifacts of one model; a release gate.",
    "retune": "Tune again from an artifact alone, on this machine, without the model.",
    "coverage": "List sizes that a deployment will ask for and an artifact lacks.",
    "merge": "Put artifacts for several machines into one bundle.",
    "records": "List, count, prune, merge or export the database of measurements.",
    "plan": "Show programs, tasks and candidates without tuning and without a GPU.",
    "schema": "Print the configuration's JSON Schema, for editors and validators.",
}

# Runs when the first argument names no command: `tune-model model.yaml` is `tune-model tune model.yaml`.
DEFAULT: Final = "tune"
