"""A coordinate descent, told step by step."""

from collections.abc import Iterator, Sequence

from tune_model.tune.candidate import Config
from tune_model.tune.records.facts import Trail
from tune_model.tune.search.descent import Footprint, Tried

__all__ = ["told"]


def told(trail: Trail) -> Iterator[str]:
    """Yield a line per footprint: where it stood, what one notch up or down changed, where it went."""
    number = -1
    for step in trail.footprints:
        if step.descent != number:
            number = step.descent
            start = ", ".join(f"{name}={value}" for name, value in step.at.config)
            yield f"{trail.candidate.family}, descent {number + 1} from {start}: {_time(step.at)}"
        yield f"  {_time(step.at)}: {_tried(step)}{_move(step)}"
    tried = sum(len(step.tried) for step in trail.footprints)
    times = [t.time_us for step in trail.footprints for t in (step.at, *step.tried) if t.time_us is not None]
    if times and trail.footprints[0].at.time_us is not None:
        yield f"  {tried + 1} tried, start / best {trail.footprints[0].at.time_us / min(times):.3f}"


def _tried(step: Footprint) -> str:
    parts = [f"{_change(step.at.config, one.config)} {_time(one)}" for one in step.tried]
    return f"{step.around} {', '.join(parts)}" if parts else f"{step.around} all known"


def _move(step: Footprint) -> str:
    return "; stays" if step.to is None else f"; to {_change(step.at.config, step.to)}"


def _time(tried: Tried) -> str:
    return "out" if tried.time_us is None else f"{tried.time_us:.2f} us"


def _change(here: Config, there: Config) -> str:
    changed: Sequence[str] = [f"{name}={b}" for (name, a), (_, b) in zip(here, there, strict=True) if a != b]
    return " ".join(changed)
