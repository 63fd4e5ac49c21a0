"""What a user does with one model, in a process of its own: plan, package, verify, load, compare with the original.

    python -m architectures.trial CONFIG FOLDER

writes FOLDER/trial.json. A refusal is a result; whatever else is raised ends the process and is the row's failure.
"""

import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from architectures.comparing import compare
from architectures.shares import shares_of
from architectures.untimed import untimed
from tune_model.extract.checking.equivalence import EquivalenceError
from tune_model.extract.plan import Extraction
from tune_model.extract.request import Request
from tune_model.extract.task import Skipped
from tune_model.package.contents import ArtifactContents
from tune_model.package.read import Artifact, open_artifact
from tune_model.package.verify import verify
from tune_model.package.write import write_artifact
from tune_model.pipeline.config import dump_config, load_config
from tune_model.pipeline.config.loading import LoadedConfig
from tune_model.pipeline.extraction import extract_configured
from tune_model.runtime.errors import TuneModelError
from tune_model.tune.machine.probe import probe_target

__all__ = ["main", "try_model"]


def main(config: str, folder: str) -> None:
    """Try one and leave the row in the folder."""
    started = time.monotonic()
    row = try_model(Path(config), Path(folder))
    row["seconds"] = round(time.monotonic() - started, 1)
    (Path(folder) / "trial.json").write_text(json.dumps(row), encoding="utf-8")


def try_model(config: Path, folder: Path) -> dict[str, Any]:
    """Do all of it.

    Args:
        config: The configuration.
        folder: The artifact goes here.

    Returns:
        The row: `refused` with the error, or `works` or `differs` with what was seen.
    """
    loaded = load_config(str(config), ["search.effort=quick"])
    try:
        request, extraction = extract_configured(loaded)
    except TuneModelError as error:
        cause = error.__cause__ or error
        says = " ".join(str(cause).split())
        if isinstance(cause, EquivalenceError):
            return {"status": "differs", "wrong": [says]}
        return {"status": "refused", "error": type(cause).__name__, "says": says}
    opened = open_artifact(_packaged(folder / f"{config.stem}.tuned", loaded, request, extraction))
    checks = verify(opened.path).checks
    compared = compare(opened)
    wrong = [f"{c.name}: {c.seen}" for c in checks if c.outcome in {"failed", "skipped"}] + compared.wrong
    plan = extraction.plan
    return {
        "status": "differs" if wrong else "works",
        **({"wrong": wrong} if wrong else {}),
        "steps": sum(len(program.steps) for program in plan.programs),
        "forms": len({key for program in plan.programs for key in program.forms}),
        "tasks": len(plan.tasks),
        "own_kernels": _own_kernels(opened),
        **shares_of(opened),
        "aten": _by_operator(plan.skipped),
        "error": compared.error,
        "compared": compared.outputs,
        "tokens": compared.tokens,
        "checks": len(checks),
        "notes": [note for note in plan.notes if not note.startswith("compared with")],
    }


def _packaged(place: Path, loaded: LoadedConfig, request: Request, extraction: Extraction) -> Path:
    tuning = untimed(extraction.plan, probe_target("cpu"))
    text = dump_config(loaded.config)
    return write_artifact(place, ArtifactContents(loaded.config.name, request, tuning, extraction.constants, text))


def _own_kernels(artifact: Artifact) -> int:
    """Count forms that something else than plain operators was chosen for, at some point of the grid."""
    return sum(any(e.candidate != "aten" for e in entries) for entries in artifact.replay.forms.values())


def _by_operator(skipped: Sequence[Skipped]) -> list[dict[str, Any]]:
    """Sum up what stays as it is over the programs."""
    counts: dict[tuple[str, str], int] = {}
    for entry in skipped:
        key = (entry.op, entry.reason)
        counts[key] = counts.get(key, 0) + entry.count
    return [{"op": op, "reason": reason, "count": count} for (op, reason), count in counts.items()]


if __name__ == "__main__":
    main(*sys.argv[1:])
