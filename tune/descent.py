"""Coordinate descent over one family's configurations: from a start, one parameter one notch at a time. Pure.

The notches of a parameter are the values it takes anywhere in the family's list, in order. Only configurations in the
list are legal. Whole neighbourhoods are announced before they are timed, so that they can be built together.
"""

from collections.abc import Callable, Sequence

from tune_model.tune.candidate import Config

__all__ = ["descend", "neighbours"]


def neighbours(config: Config, space: Sequence[Config]) -> list[Config]:
    """Return the legal configurations that differ in one parameter by one notch, in the space's order."""
    legal = set(space)
    notches = _notches(space)
    found: set[Config] = set()
    for place, (name, value) in enumerate(config):
        values = notches[name]
        at = values.index(value)
        for other in values[max(at - 1, 0) : at] + values[at + 1 : at + 2]:
            moved = (*config[:place], (name, other), *config[place + 1 :])
            if moved in legal:
                found.add(moved)
    return [c for c in space if c in found]


def descend(
    start: Config,
    space: Sequence[Config],
    time: Callable[[Config], float | None],
    announce: Callable[[Sequence[Config]], None],
    threshold: float = 0.01,
) -> list[Config]:
    """Climb to a configuration none of whose neighbours is faster.

    Args:
        start: Where to begin; in `space`.
        space: All legal configurations.
        time: Microseconds of a configuration, `None` when it is out; asked once for each.
        announce: Told which configurations will be asked for next.
        threshold: A move must gain at least this share, or noise would keep it walking.

    Returns:
        Every configuration that has a time, fastest first.
    """
    times: dict[Config, float | None] = {}

    def measure(configs: Sequence[Config]) -> None:
        new = [c for c in configs if c not in times]
        announce(new)
        for config in new:
            times[config] = time(config)

    measure([start])
    here = start
    while True:
        around = neighbours(here, space)
        measure(around)
        timed = {c: t for c in [here, *around] if (t := times[c]) is not None}
        if not timed:
            # The start and all its neighbours are out: go on from the first of the space that is not.
            rest = [c for c in space if c not in times]
            if not rest:
                break
            measure(rest[:1])
            here = rest[0]
            continue
        best = min(timed, key=lambda c: timed[c])
        now = times[here]
        if best == here or (now is not None and timed[best] > now * (1.0 - threshold)):
            break
        here = best
    known = {c: t for c, t in times.items() if t is not None}
    return sorted(known, key=lambda c: known[c])


def _notches(space: Sequence[Config]) -> dict[str, list[int | float | str | bool]]:
    """Return each parameter's values, numbers ascending, texts in order of appearance."""
    notches: dict[str, list[int | float | str | bool]] = {}
    for config in space:
        for name, value in config:
            values = notches.setdefault(name, [])
            if value not in values:
                values.append(value)
    return {
        name: values if any(isinstance(v, str) for v in values) else sorted(values, key=float)
        for name, values in notches.items()
    }
