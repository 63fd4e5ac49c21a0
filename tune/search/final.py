"""The final of a race: the finalists and the extern timed interleaved, again while something disturbs them."""

import logging
import math
from collections.abc import Sequence

from tune_model.tune.candidate import Built, Candidate, Rejected
from tune_model.tune.device import Samples
from tune_model.tune.measuring.interval import paired_ratio, percentile
from tune_model.tune.records.database import Finalist, Outcome
from tune_model.tune.search.trials import FINAL_RUNG, Trials, UnmeasurableError, mind_abandonment

__all__ = ["hold_final"]

logger = logging.getLogger(__name__)

_REPEATS = 3
"""Of a final that other processes disturb; one that merely drifts is repeated once."""


def hold_final(trials: Trials, finalists: Sequence[Candidate]) -> Outcome:
    """Time the finalists interleaved with the extern; one that fails is out, and the rest go again.

    Raises:
        UnmeasurableError: The extern fails; its task has been measured before, so this is no property of it.
    """
    shop = trials.shop
    field = [trials.baseline, *finalists]
    repeats = 0
    began = shop.budget.spent_s
    while True:
        trials.mind_interruption()
        entries = _entries(trials, field)
        results = shop.device.compare(tuple(entries), trials.policy.final)
        if isinstance(results, Rejected):
            mind_abandonment(results)
            field = _smaller_field(trials, entries, results)
            continue
        failed = {c: r for (c, _), r in zip(entries, results, strict=True) if isinstance(r, Rejected)}
        for rejected in failed.values():
            mind_abandonment(rejected)
        if trials.baseline in failed:
            raise UnmeasurableError(failed[trials.baseline], may_pass=True)
        if failed:
            for candidate, rejected in failed.items():
                trials.refuse(candidate, rejected)
            field = [c for c in field if c not in failed]
            continue
        samples = {c: r for (c, _), r in zip(entries, results, strict=True) if isinstance(r, Samples)}
        if repeats < _REPEATS and any(found.disturbed for found in samples.values()):
            doubtful = any(found.doubtful for found in samples.values())
            repeats += 1 if doubtful else _REPEATS
            if not doubtful or shop.pause():
                shop.repeated += 1
                continue
        shop.budget.note_final(shop.budget.spent_s - began, len(field))
        return _outcome(trials, entries, samples)


def _smaller_field(trials: Trials, entries: Sequence[tuple[Candidate, Built]], rejected: Rejected) -> list[Candidate]:
    """Return the extern and the faster half of the others, which fail together though none of them does alone.

    The last one left is out: the extern has been timed without it.

    Raises:
        UnmeasurableError: There is no other.
    """
    rivals = sorted((c for c, _ in entries[1:]), key=lambda c: trials.times.get(c, math.inf))
    if not rivals:
        raise UnmeasurableError(rejected, may_pass=True)
    if len(rivals) == 1:
        trials.refuse(rivals[0], rejected)
    kept = rivals[: len(rivals) // 2]
    text = f"{rejected.reason}: {rejected.detail}"
    logger.warning("%s: %d finalists fail, none of them alone (%s)", trials.planned.label, len(rivals), text)
    return [trials.baseline, *kept]


def _entries(trials: Trials, field: Sequence[Candidate]) -> list[tuple[Candidate, Built]]:
    """Return those of the field that are built and right."""
    entries: list[tuple[Candidate, Built]] = []
    for candidate in field:
        built = trials.builds.obtain(candidate)
        problem = built if isinstance(built, Rejected) else trials.check(candidate, built)
        if problem is not None:
            mind_abandonment(problem)
            trials.refuse(candidate, problem)
        elif isinstance(built, Built):
            entries.append((candidate, built))
    return entries


def _outcome(trials: Trials, entries: list[tuple[Candidate, Built]], samples: dict[Candidate, Samples]) -> Outcome:
    extern = samples[trials.baseline]
    finalists: list[Finalist] = []
    for candidate, built in entries:
        trials.write(candidate, samples[candidate], FINAL_RUNG, "final")
        gain = paired_ratio(extern.us, samples[candidate].us)
        kernel = built.kernel
        finalists.append(
            Finalist(
                candidate,
                kernel.layouts,
                percentile(samples[candidate].us, 0.5),
                gain.median,
                gain.low,
                gain.high,
                len(kernel.steps) + len(kernel.workspaces),
                not kernel.requires,
                samples[candidate].doubtful,
            )
        )
    return Outcome((finalists[0], *sorted(finalists[1:], key=lambda f: -f.gain)))
