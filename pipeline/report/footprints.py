"""Footprints of a coordinate descent as facts: where it stood, what it looked at, what changed where it went."""

from collections.abc import Iterator

from tune_model.pipeline.report.facts import FootprintFacts
from tune_model.tune.candidate import Candidate, Config, label
from tune_model.tune.records.facts import Trail

__all__ = ["footprints"]


def footprints(trail: Trail) -> Iterator[FootprintFacts]:
    """Yield the steps of a trail, in order."""
    family = trail.candidate.family
    for step in trail.footprints:
        yield FootprintFacts(
            family=family,
            descent=step.descent,
            at=label(Candidate(family, step.at.config)),
            at_us=step.at.time_us,
            tried=len(step.tried),
            around=step.around,
            to="" if step.to is None else label(Candidate(family, step.to)),
            moved="" if step.to is None else _moved(step.at.config, step.to),
        )


def _moved(before: Config, after: Config) -> str:
    """Say which parameters changed, and how."""
    old = dict(before)
    return ", ".join(f"{name} {old.get(name, '-')} -> {value}" for name, value in after if old.get(name) != value)
