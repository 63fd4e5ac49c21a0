"""Coordinate descent over one family's configurations: from a start, one parameter one notch at a time. Pure.

The notches of a parameter are the values it takes anywhere in the family's list, in order. Only configurations in the
list are legal. Whole neighbourhoods are announced before they are timed, so that they can be built together. Every
footprint is kept: where it stood, what was tried around it, where it went.
"""

from collections.abc import Callable, Iterable, Sequence
from itertools import combinations
from typing import Literal, NamedTuple

import msgspec

from tune_model.tune.candidate import Config, Effort

__all__ = [
    "CLIMBS_AT_MOST",
    "Descent",
    "Footprint",
    "Rules",
    "Tried",
    "descend",
    "diagonals",
    "expected_climbs",
    "expected_count",
    "is_climbed",
    "neighbours",
    "rules_for",
]

_CLIMBED = frozenset({"reduction", "pointwise", "attention"})
"""Kinds of forms whose kernels have parameters with smooth effects; a matmul's tiles have not."""

_WORTH_IT = {True: 16, False: 12}
"""Up to so many configurations are all timed: where builds run ahead a descent waits for each step, elsewhere not."""

_TIMED = 32
"""What a descent and its restart time, about."""

CLIMBS_AT_MOST = {Effort.QUICK: 0, Effort.BALANCED: 24}
"""So many configurations all climbs after a race of matmuls ask for, about two neighbourhoods; `thorough` has no limit.

Builds are what a search on a GPU waits for.
"""

_LINKED = (("pdl", "prefetch"), ("pdl", "last_joins"), ("splits", "num_warps"))
"""Parameters that are also moved together: what is asked for before a predecessor is done needs a dependent launch; a
second launch that joins partial results costs little where it is a dependent one; how many splits are best and with how
many warps was found to rise and fall together. Numbers move in the same direction."""

_FAR = 3
"""A descent that starts again begins at least so many notches from everything that was timed."""


Look = Literal["neighbours", "diagonals", "switches"]
"""How far a footprint looked."""


class Tried(msgspec.Struct, frozen=True, omit_defaults=True):
    """A configuration that a footprint asked about, and its time; `None` when it is out."""

    config: Config
    time_us: float | None = None


class Footprint(msgspec.Struct, frozen=True, omit_defaults=True):
    """One step of a descent.

    Attributes:
        descent: 0 for the first, then one more for each restart.
        at: Where it stood; without a time when that configuration is out.
        around: How far it looked: one parameter, two at once, or the switches of the fastest.
        tried: What was asked for the first time here, in order.
        to: Where it went; `None` when nothing around was faster.
    """

    descent: int
    at: Tried
    around: Look
    tried: tuple[Tried, ...]
    to: Config | None = None


class Rules(msgspec.Struct, frozen=True):
    """How a descent is run.

    Attributes:
        threshold: A move must gain at least this share, or noise would keep it walking.
        diagonals: Where no parameter alone gains, try all pairs before stopping.
        switches: Then turn the switches (parameters that are on or off) of so many, the fastest that were timed: how a
            kernel is launched changes its time alike for many tiles, so the next best with it may be the best.
        restarts: How often to begin again, far from everything that was timed.
        hopeless: A restart ends where it stands this share slower than the best of all; `None` lets it walk on.
        most: It ends when it has asked for so many configurations; `None` lets it walk on.
    """

    threshold: float = 0.003
    diagonals: bool = False
    switches: int = 0
    restarts: int = 0
    hopeless: float | None = None
    most: int | None = None


_BY_EFFORT = {
    Effort.QUICK: Rules(),
    Effort.BALANCED: Rules(switches=3, restarts=1, hopeless=0.15),
    Effort.THOROUGH: Rules(diagonals=True, switches=3, restarts=3),
}


def rules_for(effort: Effort, *, builds_ahead: bool) -> Rules:
    """Return how to descend; where builds and timings wait for each other, once."""
    return _BY_EFFORT[effort] if builds_ahead else Rules()


def is_climbed(kind: str, count: int, *, builds_ahead: bool) -> bool:
    """Say whether `count` configurations of a family for a form of a kind are climbed; otherwise all are timed."""
    return kind in _CLIMBED and count > _WORTH_IT[builds_ahead]


def expected_count(kind: str, count: int, *, builds_ahead: bool) -> int:
    """Return about how many of a family's `count` configurations will be timed."""
    return min(count, _TIMED) if is_climbed(kind, count, builds_ahead=builds_ahead) else count


def expected_climbs(kind: str, effort: Effort, *, builds_ahead: bool) -> int:
    """Return about how many configurations climbs after a race will time: of matmuls, where builds run ahead."""
    return CLIMBS_AT_MOST.get(effort, _TIMED) if kind == "matmul" and builds_ahead else 0


class Descent(NamedTuple):
    """What a descent found.

    Attributes:
        found: Every configuration that has a time, fastest first.
        footprints: In order.
    """

    found: list[Config]
    footprints: tuple[Footprint, ...]


def neighbours(config: Config, space: Sequence[Config]) -> list[Config]:
    """Return the legal configurations that differ in one parameter by one notch, in the space's order."""
    return _Space(space).around(config, 1)


def diagonals(config: Config, space: Sequence[Config]) -> list[Config]:
    """Return the legal configurations that differ in two parameters by one notch each, in the space's order."""
    return _Space(space).around(config, 2)


def descend(
    start: Config,
    space: Sequence[Config],
    time: Callable[[Config], float | None],
    announce: Callable[[Sequence[Config]], None],
    rules: Rules | None = None,
) -> Descent:
    """Climb to a configuration none of whose neighbours is faster.

    Args:
        start: Where to begin; in `space`.
        space: All legal configurations, the likeliest first.
        time: Microseconds of a configuration, `None` when it is out; asked once for each.
        announce: Told which configurations will be asked for next.
        rules: How.
    """
    walker = _Walker(_Space(space), time, announce, rules or Rules())
    here: Config | None = start
    for number in range((rules or Rules()).restarts + 1):
        if here is not None:
            walker.walk(here, number)
            here = walker.far_from_all()
    known = {c: t for c, t in walker.times.items() if t is not None}
    return Descent(sorted(known, key=lambda c: known[c]), tuple(walker.footprints))


class _Space:
    """Legal configurations and the notches of their parameters: numbers ascending, texts in order of appearance."""

    def __init__(self, configs: Sequence[Config]) -> None:
        self.configs = configs
        self.places = {config: place for place, config in enumerate(configs)}
        found: dict[str, list[int | float | str | bool]] = {}
        for config in configs:
            for name, value in config:
                values = found.setdefault(name, [])
                if value not in values:
                    values.append(value)
        self.notches = {
            name: values if any(isinstance(v, str) for v in values) else sorted(values, key=float)
            for name, values in found.items()
        }

    def _moves(self, config: Config, place: int) -> list[Config]:
        name, value = config[place]
        values = self.notches[name]
        at = values.index(value)
        others = values[max(at - 1, 0) : at] + values[at + 1 : at + 2]
        return [(*config[:place], (name, other), *config[place + 1 :]) for other in others]

    def _together(self, config: Config, places: Iterable[int]) -> list[Config]:
        moved = [config]
        for place in places:
            moved = [further for one in moved for further in self._moves(one, place)]
        return moved

    def _linked(self, config: Config) -> list[Config]:
        """Move linked parameters together."""
        here = dict(config)
        names = list(here)
        found: list[Config] = []
        for pair in _LINKED:
            if set(pair) <= set(names):
                moved = self._together(config, [names.index(name) for name in pair])
                found += [c for c in moved if len({_direction(here[name], dict(c)[name]) for name in pair}) == 1]
        return found

    def switched(self, config: Config) -> list[Config]:
        """Return the legal configurations that differ in one switch."""
        switches = [place for place, (_, value) in enumerate(config) if isinstance(value, bool)]
        return [c for place in switches for c in self._moves(config, place) if c in self.places]

    def around(self, config: Config, parameters: int) -> list[Config]:
        """Return the legal configurations that differ in so many parameters by one notch each.

        Linked parameters that move together count as one.
        """
        found: set[Config] = set()
        for places in combinations(range(len(config)), parameters):
            found.update(self._together(config, places))
        if parameters == 1:
            found.update(self._linked(config))
        return sorted((c for c in found if c in self.places), key=lambda c: self.places[c])

    def distance(self, a: Config, b: Config) -> int:
        """Return how many notches lie between two configurations."""
        steps = 0
        for (name, here), (_, there) in zip(a, b, strict=True):
            values = self.notches[name]
            steps += abs(values.index(here) - values.index(there))
        return steps


def _direction(before: float | str | bool, after: float | str | bool) -> int:
    """Return 1 for a larger number and for every switch that is turned, else -1."""
    if isinstance(before, (bool, str)) or isinstance(after, str):
        return 1
    return 1 if after > before else -1


class _Walker:
    """Times and footprints of all descents over one space."""

    def __init__(
        self,
        space: _Space,
        time: Callable[[Config], float | None],
        announce: Callable[[Sequence[Config]], None],
        rules: Rules,
    ) -> None:
        self.space = space
        self.rules = rules
        self.times: dict[Config, float | None] = {}
        self.footprints: list[Footprint] = []
        self._time = time
        self._announce = announce

    def walk(self, start: Config, number: int) -> None:
        """Descend from a configuration until nothing around is faster."""
        self._measure([start])
        here = start if start in self.times else None
        while here is not None:
            here = self._step(here, number)
            if number > 0 and here is not None and self._is_hopeless(here):
                return

    def _fastest(self, count: int) -> list[Config]:
        known = {c: t for c, t in self.times.items() if t is not None}
        return sorted(known, key=lambda c: known[c])[:count]

    def far_from_all(self) -> Config | None:
        """Return the likeliest configuration that is far from everything timed."""
        timed = list(self.times)
        return next(
            (c for c in self.space.configs if all(self.space.distance(c, known) >= _FAR for known in timed)), None
        )

    def _is_hopeless(self, here: Config) -> bool:
        now = self.times[here]
        best = min((t for t in self.times.values() if t is not None), default=None)
        if self.rules.hopeless is None or now is None or best is None:
            return False
        return now > best * (1.0 + self.rules.hopeless)

    @property
    def _is_spent(self) -> bool:
        return self.rules.most is not None and len(self.times) >= self.rules.most

    def _look(self, here: Config, parameters: int) -> tuple[list[Config], tuple[Tried, ...]]:
        """Time what lies around; returns all of it that has been timed, and what was new."""
        around = self.space.around(here, parameters)
        tried = self._measure(around)
        return [c for c in around if c in self.times], tried

    def _measure(self, configs: Sequence[Config]) -> tuple[Tried, ...]:
        new = [c for c in configs if c not in self.times]
        if self.rules.most is not None:
            new = new[: max(0, self.rules.most - len(self.times))]
        self._announce(new)
        for config in new:
            self.times[config] = self._time(config)
        return tuple(Tried(config, self.times[config]) for config in new)

    def _step(self, here: Config, number: int) -> Config | None:
        around, tried = self._look(here, 1)
        if all(self.times[c] is None for c in (here, *around)):
            # The start and all its neighbours are out: go on from the first of the space that is not.
            rest = [c for c in self.space.configs if c not in self.times]
            to = rest[0] if rest and not self._is_spent else None
            self._note(number, here, "neighbours", tried, to)
            if to is not None:
                self._measure([to])
            return to
        to = self._faster(here, around)
        self._note(number, here, "neighbours", tried, to)
        if to is None and self.rules.diagonals:
            around, tried = self._look(here, 2)
            to = self._faster(here, around)
            self._note(number, here, "diagonals", tried, to)
        if to is None and self.rules.switches:
            turned = [c for fast in self._fastest(self.rules.switches) for c in self.space.switched(fast)]
            tried = self._measure(list(dict.fromkeys(turned)))
            to = self._faster(here, [c.config for c in tried])
            if tried:
                self._note(number, here, "switches", tried, to)
        return to

    def _faster(self, here: Config, around: Sequence[Config]) -> Config | None:
        """Return the fastest around, if it gains enough."""
        timed = {c: t for c in around if (t := self.times[c]) is not None}
        now = self.times[here]
        if not timed:
            return None
        best = min(timed, key=lambda c: timed[c])
        return best if now is None or timed[best] <= now * (1.0 - self.rules.threshold) else None

    def _note(
        self,
        number: int,
        here: Config,
        around: Look,
        tried: tuple[Tried, ...],
        to: Config | None,
    ) -> None:
        self.footprints.append(Footprint(number, Tried(here, self.times[here]), around, tried, to))
