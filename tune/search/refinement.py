"""After a race of matmuls: climb from the best through the whole space, of which the raced list is the likeliest part.

What suits one shape best is often a notch beside a tile that suits many.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Final

from tune_model.extract.task import PlannedTask
from tune_model.tune.candidate import Candidate, Config, Effort
from tune_model.tune.records.facts import Trail
from tune_model.tune.search.descent import CLIMBS_AT_MOST, Rules, descend
from tune_model.tune.workshop import Workshop

__all__ = ["Refinement"]

_NEAR: Final = 1.05
"""A family is refined when its best comes so near to the best of all."""

_MUST_GAIN: Final = 0.01
"""A move's: tiles change a product's time by more, and every move costs builds."""

_KEPT: Final = 2
"""So many of what a climb found meet the others in the final."""


class Refinement:
    """The climbs of one task.

    Args:
        planned: The task.
        shop: Families, target and effort.
        raced: Per family, the list that is raced.
    """

    def __init__(self, planned: PlannedTask, shop: Workshop, raced: Mapping[str, tuple[Config, ...]]) -> None:
        self._planned = planned
        self._shop = shop
        self._raced = raced
        self._spaces: dict[str, tuple[Config, ...]] = {}

    @property
    def is_due(self) -> bool:
        """Tiles of matmuls on a GPU, where builds are ready by the time that they are asked for."""
        thorough = self._shop.options.effort is not Effort.QUICK
        return self._planned.task.form.kind == "matmul" and self._shop.overlap and thorough

    def space(self, name: str) -> tuple[Config, ...]:
        """Return all that a family could offer, what is raced first."""
        if name not in self._spaces:
            family = self._shop.family(Candidate(name))
            whole = family.configurations(self._planned.task, self._shop.target, Effort.THOROUGH)
            self._spaces[name] = tuple(dict.fromkeys((*self._raced.get(name, ()), *whole)))
        return self._spaces[name]

    def offers(self, candidate: Candidate) -> bool:
        """Say whether a climb could come to a candidate."""
        return self.is_due and candidate.family in self._raced and candidate.config in self.space(candidate.family)

    def climb(
        self,
        times: Mapping[Candidate, float],
        time: Callable[[Candidate], float | None],
        announce: Callable[[Sequence[Candidate]], None],
    ) -> tuple[list[Candidate], list[Trail]]:
        """Climb from the fastest candidate of every family that is about to win.

        Args:
            times: Microseconds of the extern and of the race's survivors.
            time: Microseconds of a candidate, timed now and longer than at the start of a race; `None` when it is out.
            announce: Told which candidates will be asked for next.

        Returns:
            The best of each climb, and its footprints.
        """
        best: list[Candidate] = []
        trails: list[Trail] = []
        limit = _NEAR * min(times.values(), default=0.0)
        left = CLIMBS_AT_MOST.get(self._shop.options.effort)
        for start in sorted(times, key=lambda candidate: times[candidate]):
            name = start.family
            climbed = {trail.candidate.family for trail in trails}
            if times[start] > limit or name in climbed or len(self.space(name)) == len(self._raced.get(name, ())):
                continue
            if left is not None and left <= 1:  # the start alone
                break
            found, footprints = descend(
                start.config,
                self.space(name),
                lambda config, name=name: time(Candidate(name, config)),  # type: ignore[misc]
                lambda configs, name=name: announce([Candidate(name, config) for config in configs]),  # type: ignore[misc]
                Rules(threshold=_MUST_GAIN, most=left),
            )
            if left is not None:
                left -= 1 + sum(len(step.tried) for step in footprints)
            best += [Candidate(name, config) for config in found[:_KEPT]]
            trails.append(Trail(Candidate(name), footprints))
        return best, trails
