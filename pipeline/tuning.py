"""What every command that tunes does alike: options from a configuration, and after the races the artifact."""

import os
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

from tune_model.pipeline.config import budget_seconds
from tune_model.pipeline.store import kernels_path, records_path

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tune_model.package.contents import ArtifactContents
    from tune_model.package.signature import Signer
    from tune_model.pipeline.config import Config
    from tune_model.tune.choice import Tuning
    from tune_model.tune.options import TuneOptions

__all__ = ["exit_code", "finish", "tune_options"]

EXIT_PARTIAL: Final = 3
EXIT_INTERRUPTED: Final = 130
_COMPLETE: Final = frozenset({"tuned", "no gain", "layout", "invariant", "disturbed"})


def tune_options(config: "Config", store: Path, *, recheck: bool) -> "TuneOptions":
    """Return how to tune: as the configuration says, with all processors building that this process may use.

    Args:
        config: Effort, budget and seed.
        store: Folder of records and kernels.
        recheck: Measure again what the records already hold.
    """
    from tune_model.tune.candidate import Effort
    from tune_model.tune.options import TuneOptions

    return TuneOptions(
        effort=Effort(config.search.effort),
        budget_s=budget_seconds(config),
        seed=config.search.seed,
        records_path=records_path(store),
        kernels_path=kernels_path(store),
        recheck=recheck,
        build_workers=len(os.sched_getaffinity(0)),
    )


def finish(
    contents: "ArtifactContents",
    output: str,
    *,
    as_json: bool,
    signer: "Signer | None" = None,
    save_path: str | None = None,
    arguments: "Sequence[str]" = (),
) -> int:
    """Write the artifact with its report, print the scoreboard; returns the exit code.

    Args:
        contents: What was tuned.
        output: Where the artifact goes.
        as_json: Without a scoreboard.
        signer: Signs it.
        save_path: Where what tuning took and found goes, as a benchmark result.
        arguments: The command line, which such a result names.

    Raises:
        OutputError: It cannot be written there.
    """
    from tune_model.package.write import write_artifact
    from tune_model.pipeline.bench.cost import write_cost
    from tune_model.pipeline.console import console, size_text
    from tune_model.pipeline.report.gather import gather
    from tune_model.pipeline.report.html import render_html
    from tune_model.pipeline.report.source import from_contents
    from tune_model.pipeline.scoreboard import print_scoreboard

    facts = gather(from_contents(contents))
    place = write_artifact(output, replace(contents, report_html=render_html(facts)), signer=signer)
    if not as_json:
        print_scoreboard(facts, console(), repeated=contents.tuning.repeated)
    console(error=True).print(f"wrote {place} ({size_text(_size(place))})", markup=False)
    code = exit_code(contents.tuning)
    if save_path is not None:
        write_cost(Path(save_path), facts, contents.tuning, arguments, complete=code == 0)
    return code


def exit_code(tuning: "Tuning") -> int:
    """Return 0 when every task was searched, 3 when some failed or the budget ended first, 130 after a signal."""
    if tuning.stopped == "interrupted":
        return EXIT_INTERRUPTED
    complete = all(choice.status in _COMPLETE for choice in tuning.choices)
    return 0 if complete and not tuning.stopped else EXIT_PARTIAL


def _size(place: Path) -> int:
    files = [place] if place.is_file() else [path for path in place.rglob("*") if path.is_file()]
    return sum(path.stat().st_size for path in files)
