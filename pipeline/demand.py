"""What a deployment asks for: the grid of a configuration, or what servers wrote down; and sizes to add to a grid."""

import itertools
import logging
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

import msgspec

from tune_model.pipeline.config import Override
from tune_model.runtime.coverage import CoverageRecord, ModelIdentity, PointRow, read_coverage
from tune_model.runtime.errors import TuneModelError
from tune_model.runtime.generation.continuation import CONTINUATION

if TYPE_CHECKING:
    from tune_model.extract.request import Phase
    from tune_model.package.coverage import Asked
    from tune_model.pipeline.config import LoadedConfig

__all__ = ["Added", "OtherWorkloadError", "asked_by_phases", "asked_by_servers", "sizes_to_add"]

logger = logging.getLogger(__name__)

_NEAR_ENOUGH: Final = 0.5
"""A size that is served from a neighbour is added to a grid when it is so many powers of two from every tuned one."""


class OtherWorkloadError(TuneModelError):
    """Saved coverage and a configuration or artifact are not of one model."""


class Added(NamedTuple):
    """A value to add to the workload's grid.

    Attributes:
        phase: Of the workload.
        size: Which.
        value: To add.
        runs: How often it was asked for.
    """

    phase: str
    size: str
    value: int
    runs: int


def asked_by_phases(phases: Iterable["Phase"]) -> Iterator["Asked"]:
    """Yield every point of a workload's grid."""
    from tune_model.package.coverage import Asked

    for phase in phases:
        for values in itertools.product(*phase.grid.values()):
            yield Asked(phase.name, dict(zip(phase.grid, values, strict=True)))


def asked_by_servers(paths: Iterable[Path], model: ModelIdentity) -> "list[Asked]":
    """Return what servers ran, from the files they wrote; equal sizes of several files together, most frequent first.

    Args:
        paths: Of the files.
        model: That they must be of; files of before they said so are believed, with a warning.

    Raises:
        OtherWorkloadError: One is of another model.
        CoverageFileError: A file is not saved coverage.
        OSError: One cannot be read.
    """
    from tune_model.package.coverage import Asked

    runs: dict[tuple[str, tuple[tuple[str, int], ...]], int] = {}
    for row in _points(_read(path, model) for path in paths):
        key = (row.program, tuple(sorted(row.sizes.items())))
        runs[key] = runs.get(key, 0) + row.runs
    asked = [Asked(phase, dict(sizes), count) for (phase, sizes), count in runs.items()]
    return sorted(asked, key=lambda one: (-one.runs, one.phase, sorted(one.sizes.items())))


def sizes_to_add(loaded: "LoadedConfig", paths: Iterable[Path]) -> tuple[list[Added], list[Override]]:
    """Choose what to add to a configuration's grid, so that what servers missed is tuned.

    A size at which steps ran their own operators is added; one that a neighbour's kernels served only if it is half a
    power of two or more from every value that is tuned or was added before. The most frequent come first.

    Returns:
        What is added, and the overrides of the configuration that add it.

    Raises:
        OtherWorkloadError: A file is of another model, or tells of phases or sizes that the configuration's workload
            does not have.
        CoverageFileError: A file is not saved coverage.
        OSError: One cannot be read.
    """
    from tune_model.pipeline.request import phases_of

    grids = {
        phase.name: {name: list(values) for name, values in phase.grid.items()}
        for phase in phases_of(loaded.config.workload)
    }
    added: list[Added] = []
    files = list(paths)
    model = _configured_model(loaded) if files else None
    for row in sorted(_points(_read(path, model) for path in files), key=_urgency):
        grid = grids.get(row.program)
        if grid is None or not grid.keys() & row.sizes.keys():
            raise OtherWorkloadError(
                f"{', '.join(map(str, files))}: tells of {row.program!r} with {sorted(row.sizes)}; the workload has "
                f"{_listed(grids)}; expected coverage of this model"
            )
        for name, values in grid.items():
            value = row.sizes.get(name, 0)  # a size that the program fixed is not among them
            if value > 0 and value not in values and (row.miss or _is_far(value, values)):
                added.append(Added(row.program, name, value, row.runs))
                values.append(value)
    changed = dict.fromkeys((one.phase, one.size) for one in added)
    flag = " ".join(f"--add-misses {path}" for path in files)
    return added, [Override(flag, _path(loaded, phase, name), sorted(grids[phase][name])) for phase, name in changed]


def _configured_model(loaded: "LoadedConfig") -> ModelIdentity | None:
    """Return which model a configuration is of; `None` where that model is not on this machine."""
    from tune_model.package.contents import portable_request
    from tune_model.package.identity import identify
    from tune_model.pipeline.request import ModelNotFoundError, make_request

    try:
        return identify(loaded.config.name, portable_request(make_request(loaded.config, loaded.folder)))
    except (ModelNotFoundError, OSError, ValueError):
        return None  # whoever needs the model says so


def _read(path: Path, model: ModelIdentity | None) -> CoverageRecord:
    """Read saved coverage, which must be of a model.

    What transformers models are their configuration says; of others, which come from code or a file, the name must be
    the same too.

    Raises:
        OtherWorkloadError: It is of another one.
        CoverageFileError: It is not saved coverage.
        OSError: It cannot be read.
    """
    record = read_coverage(path)
    seen = record.model
    if seen is None:
        logger.warning("%s: does not say which model it is of (saved by an older version?); taken as of this one", path)
    if seen is None or model is None:
        return record
    fields = ["task", "source"] if model.source.startswith("transformers ") else ["task", "source", "name"]
    for field in fields:
        found, expected = getattr(seen, field), getattr(model, field)
        if found != expected:
            of = "" if field == "name" else f" (the model {seen.name!r})"
            raise OtherWorkloadError(
                f"{path}: $.model.{field} is {found!r}{of}; expected {expected!r}, coverage of the model {model.name!r}"
            )
    return record


def _points(records: Iterable[CoverageRecord]) -> Iterator[PointRow]:
    """Yield what ran, by phases that an artifact has.

    A later part of a prompt runs as a prefill of its length but for its attention over the cache, which no tuning
    reaches: what it missed is no reason to tune.
    """
    for record in records:
        for row in record.points:
            if row.program == CONTINUATION:
                yield msgspec.structs.replace(row, program="prefill", near=row.near + row.miss, miss=0)
            elif row.program:
                yield row


def _urgency(row: PointRow) -> tuple[object, ...]:
    return (not row.miss, -row.runs, row.program, sorted(row.sizes.items()))


def _is_far(value: int, values: Sequence[int]) -> bool:
    return all(abs(math.log2(value / other)) >= _NEAR_ENOUGH for other in values)


def _listed(grids: Mapping[str, Mapping[str, object]]) -> str:
    return "; ".join(f"{phase} with {list(sizes)}" for phase, sizes in grids.items())


def _path(loaded: "LoadedConfig", phase: str, name: str) -> tuple[str | int, ...]:
    workload = loaded.config.workload
    named = phase == "forward" and workload.forward is not None and name in workload.forward.grid
    return ("workload", phase, "grid", name) if named else ("workload", phase, name)
