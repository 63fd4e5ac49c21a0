from collections.abc import Iterable

import pytest

from tune_model.tune.candidate import Candidate
from tune_model.tune.records.database import Finalist
from tune_model.tune.search.race import RaceRules, race, select_winner


class TableTimer:
    """Times from a table; remembers what was asked."""

    def __init__(self, times: dict[str, float | None]) -> None:
        self.times = times
        self.asked: list[tuple[str, int]] = []

    def time(self, candidate: Candidate, rung: int) -> float | None:
        self.asked.append((candidate.family, rung))
        return self.times[candidate.family]


def candidates(names: Iterable[str]) -> list[Candidate]:
    return [Candidate(name) for name in names]


def alone(_candidate: Candidate) -> str:
    return "same"


def test_everyone_is_timed_once_and_only_the_better_again():
    timer = TableTimer({f"c{i}": 10.0 + i * 0.1 for i in range(40)})
    finalists = race(candidates(reversed(timer.times)), timer, RaceRules(finalists=4, keep=0.5), alone)
    assert [c.family for c in finalists] == ["c0", "c1", "c2", "c3"]
    assert [name for name, rung in timer.asked if rung == 0] == [f"c{i}" for i in reversed(range(40))]
    rungs = {rung: sum(r == rung for _, r in timer.asked) for _, rung in timer.asked}
    assert rungs == {0: 40, 1: 20, 2: 10, 3: 5, 4: 4}


def test_a_candidate_that_fails_later_is_out():
    class Fails(TableTimer):
        def time(self, candidate: Candidate, rung: int) -> float | None:
            return None if candidate.family == "c0" and rung > 0 else super().time(candidate, rung)

    timer = Fails({f"c{i}": 10.0 + i * 0.1 for i in range(10)})
    assert race(candidates(timer.times), timer, RaceRules(finalists=3), alone)[0].family == "c1"


def test_hopeless_candidates_do_not_reach_the_final_even_when_there_is_room():
    timer = TableTimer({"fast": 1.0, "near": 1.2, "slow": 3.0, "out": None})
    assert candidates(["fast", "near"]) == race(candidates(timer.times), timer, RaceRules(finalists=5), alone)


def test_the_best_of_every_layout_survives():
    timer = TableTimer({**{f"plain{i}": 1.0 + i / 100 for i in range(20)}, "packed0": 5.0, "packed1": 4.0})
    found = race(candidates(timer.times), timer, RaceRules(finalists=3), lambda c: c.family.startswith("packed"))
    assert [c.family for c in found] == ["plain0", "plain1", "plain2", "packed1"]


def finalist(name: str, gain: float, low: float, complexity: int = 1) -> Finalist:
    return Finalist(Candidate(name), (), 10.0 / gain, gain, low, gain * 1.02, complexity, unconditional=True)


EXTERN = Finalist(Candidate("aten"), (), 10.0, 1.0, 1.0, 1.0, 1, unconditional=True)


@pytest.mark.parametrize(
    ("others", "winner"),
    [
        ([finalist("a", 1.3, 1.2)], "a"),
        ([finalist("a", 1.02, 0.99)], "aten"),
        ([finalist("a", 1.0, 1.0)], "aten"),
        ([], "aten"),
        ([finalist("a", 1.300, 1.2, complexity=3), finalist("b", 1.298, 1.2, complexity=1)], "b"),
        ([finalist("a", 1.300, 1.2, complexity=3), finalist("b", 1.2, 1.1, complexity=1)], "a"),
    ],
)
def test_the_extern_stays_unless_beaten_beyond_the_noise(others: list[Finalist], winner: str):
    assert select_winner([EXTERN, *others]).candidate.family == winner


def test_an_interval_above_one_is_no_gain_when_the_median_is_above_the_externs():
    """A winner was once shown with 0.62x and an interval from 1.04 to 1.99: half of its rounds had met a busy core."""
    odd = Finalist(Candidate("odd"), (), 16.1, 1.3, 1.04, 1.99, 1, unconditional=True)
    assert select_winner([EXTERN, odd]).candidate.family == "aten"


def test_a_doubtful_final_is_not_won():
    doubtful = Finalist(Candidate("a"), (), 1.0, 10.0, 9.0, 11.0, 1, unconditional=True, doubtful=True)
    assert select_winner([EXTERN, doubtful]).candidate.family == "aten"
