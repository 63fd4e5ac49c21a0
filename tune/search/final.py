"""Candidates and the extern timed interleaved, again while something disturbs them: the final of a race, and its heat.

A GPU under steady load clocks as its power allows, and what is fastest then need not be what is fastest in the few
milliseconds of a rung. So products that arithmetic bounds meet once before the final, many at a time (`hold_heat`).
"""

import logging
import math
from collections.abc import Sequence
from typing import Final

from tune_model.tune.candidate import Built, Candidate, Rejected
from tune_model.tune.device import Samples
from tune_model.tune.measuring.interval import paired_ratio, percentile
from tune_model.tune.measuring.policy import Rung
from tune_model.tune.records.database import Finalist, Outcome
from tune_model.tune.search.trials import FINAL_RUNG, HEAT_RUNG, Trials, UnmeasurableError, mind_abandonment

__all__ = ["hold_final", "hold_heat"]

logger = logging.getLogger(__name__)

_Field = list[tuple[Candidate, Built]]

_HEAT: Final = Rung(1000.0, 12)
"""No part of a policy and its key: whoever changes it gives `HEAT_RUNG` another number."""

_REPEATS = 3
"""Of a final that other processes disturb; one that merely drifts is repeated once."""


def hold_final(trials: Trials, finalists: Sequence[Candidate]) -> Outcome:
    """Time the finalists interleaved with the extern; one that fails is out, and the rest go again.

    Raises:
        UnmeasurableError: The extern fails; its task has been measured before, so this is no property of it.
    """
    began = trials.shop.budget.spent_s
    entries, samples = _meet(trials, finalists, trials.policy.final)
    trials.shop.budget.note_final(trials.shop.budget.spent_s - began, len(entries))
    return _outcome(trials, entries, samples)


def hold_heat(trials: Trials, field: Sequence[Candidate]) -> dict[Candidate, float]:
    """Return microseconds of those of the field that do not fail, timed interleaved or taken from the records.

    Raises:
        UnmeasurableError: The extern fails.
    """
    alive = [candidate for candidate in field if trials.refusal(candidate) is None]
    if not alive:
        return {}
    known = {c: us for c in (trials.baseline, *alive) if (us := trials.recorded_us(c, HEAT_RUNG)) is not None}
    if trials.shop.out_of_time:
        known = {c: trials.times[c] for c in alive if c in trials.times}
    elif len(known) <= len(alive):
        entries, samples = _meet(trials, alive, _HEAT)
        for candidate, _ in entries:
            trials.write(candidate, samples[candidate], HEAT_RUNG, "race")
        known = {candidate: trials.times[candidate] for candidate, _ in entries}
    trials.times |= known  # a rung's times, taken from a cooler device, are not to be compared with these
    return {candidate: us for candidate, us in known.items() if candidate != trials.baseline}


def _meet(trials: Trials, rivals: Sequence[Candidate], rung: Rung) -> tuple[_Field, dict[Candidate, Samples]]:
    """Time rivals interleaved with the extern; one that fails is out, and the rest go again."""
    shop = trials.shop
    field = [trials.baseline, *rivals]
    repeats = 0
    while True:
        trials.mind_interruption()
        entries = _entries(trials, field)
        results = shop.device.compare(tuple(entries), rung)
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
        return entries, samples


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


def _entries(trials: Trials, field: Sequence[Candidate]) -> _Field:
    """Return those of the field that are built and right."""
    entries: _Field = []
    for candidate in field:
        built = trials.builds.obtain(candidate)
        problem = built if isinstance(built, Rejected) else trials.check(candidate, built)
        if problem is not None:
            mind_abandonment(problem)
            trials.refuse(candidate, problem)
        elif isinstance(built, Built):
            entries.append((candidate, built))
    return entries


def _outcome(trials: Trials, entries: _Field, samples: dict[Candidate, Samples]) -> Outcome:
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
