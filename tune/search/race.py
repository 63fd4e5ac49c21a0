"""Successive halving over a list of candidates, and the verdict of a final. Pure: times come from a `Timer`.

Every candidate is timed briefly, the better part again and longer; the last few go to a final where they are
interleaved with the extern. Candidates that want weights in different layouts cannot replace each other, so the best of
every layout stays in.
"""

import math
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Final, Protocol

import msgspec

from tune_model.tune.candidate import Candidate
from tune_model.tune.records.database import Finalist

__all__ = ["MUST_GAIN", "RaceRules", "Timer", "beats", "race", "select_winner"]

MUST_GAIN: Final = 1.005
"""Lower end of the interval that a winner needs.

Clocks and addresses alone move a ratio by some tenths of a percent from one process to the next, and the extern should
not be given up for that.
"""


class Timer(Protocol):
    """Where times come from."""

    def time(self, candidate: Candidate, rung: int) -> float | None:
        """Return microseconds per call at a rung of the race's ladder; `None` when the candidate is out."""
        ...


class RaceRules(msgspec.Struct, frozen=True):
    """How a race is run.

    Attributes:
        finalists: How many go to the final (and the best of every layout beside them).
        keep: Share that survives a rung.
        hopeless: A candidate this many times slower than the best is not kept, whatever the share.
        heat: So many of the first rung meet at once instead of climbing the others; 0 for none.
    """

    finalists: int = 5
    keep: float = 0.4
    hopeless: float = 1.5
    heat: int = 0


def race(
    candidates: Iterable[Candidate],
    timer: Timer,
    rules: RaceRules,
    group: Callable[[Candidate], Hashable],
    meet: Callable[[Sequence[Candidate]], Mapping[Candidate, float]] | None = None,
) -> list[Candidate]:
    """Run the rungs of a race, or its first and a heat.

    Args:
        candidates: Taken one by one as they become ready; each is timed when it comes.
        timer: Times them.
        rules: How many survive.
        group: Candidates of different groups do not displace each other; the best of each group survives.
        meet: Times the candidates of a heat in the same rounds; those that fail are not in what it returns.

    Returns:
        The finalists, fastest first.
    """
    times: dict[Candidate, float] = {}
    for candidate in candidates:
        time_us = timer.time(candidate, 0)
        if time_us is not None:
            times[candidate] = time_us
    if rules.heat and meet is not None:
        hot = meet(_survivors(times, rules.heat, rules, group))
        return _survivors(hot, rules.finalists, rules, group)
    rung = 1
    alive = _survivors(times, len(times), rules, group)
    while len(alive) > rules.finalists:
        count = max(rules.finalists, math.ceil(len(alive) * rules.keep))
        kept = _survivors({c: times[c] for c in alive}, count, rules, group)
        if len(kept) == len(alive):
            break
        times = {c: t for c in kept if (t := timer.time(c, rung)) is not None}
        alive = _survivors(times, len(times), rules, group)
        rung += 1
    return alive


def beats(finalist: Finalist, extern: Finalist) -> bool:
    """Say whether a finalist is surely faster than the extern, and by enough to still be so in another process."""
    return finalist.gain_low >= MUST_GAIN and finalist.median_us < extern.median_us and not finalist.doubtful


def select_winner(finalists: Sequence[Finalist], tie: float = 0.003) -> Finalist:
    """Return the winner of a final.

    The extern stays unless another beats it beyond the noise. Among those within `tie` of the fastest the simplest
    kernel wins, then the faster.

    Args:
        finalists: The extern first.
        tie: Relative difference of medians that does not count.
    """
    better = [f for f in finalists[1:] if beats(f, finalists[0])]
    if not better:
        return finalists[0]
    best = max(f.gain for f in better)
    near = [f for f in better if f.gain >= best * (1.0 - tie)]
    return min(near, key=lambda f: (f.complexity, -f.gain))


def _survivors(
    times: Mapping[Candidate, float], count: int, rules: RaceRules, group: Callable[[Candidate], Hashable]
) -> list[Candidate]:
    """Return the fastest `count` that are not hopeless, and the best of every group."""
    ordered = sorted(times, key=lambda c: times[c])
    if not ordered:
        return []
    limit = times[ordered[0]] * rules.hopeless
    kept: list[Candidate] = []
    seen: set[Hashable] = set()
    for place, candidate in enumerate(ordered):
        member = group(candidate)
        if (place < count and times[candidate] <= limit) or member not in seen:
            kept.append(candidate)
            seen.add(member)
    return kept
