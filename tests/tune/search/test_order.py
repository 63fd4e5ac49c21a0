from itertools import islice

import pytest

from tune_model.tune.candidate import Effort
from tune_model.tune.search.order import LIMITS, interleave, thin, with_dependent_launch, with_prefetch

TILES = [(("tile", n),) for n in range(12)]


@pytest.mark.parametrize("effort", list(Effort))
def test_a_family_gets_its_share(effort: Effort):
    assert len(list(thin(((("n", n),) for n in range(10_000)), effort, 0.5))) == LIMITS[effort] // 2
    assert list(thin(TILES[:1], effort, 0.001)) == TILES[:1]


def test_nothing_is_lost_or_doubled():
    for found in (with_dependent_launch(TILES, offered=True), with_prefetch(TILES, offered=True)):
        listed = list(found)
        assert len(set(listed)) == len(listed)
    assert len(list(with_dependent_launch(TILES, offered=True))) == 2 * len(TILES)
    assert len(list(with_prefetch(TILES, offered=True))) == 3 * len(TILES)
    assert list(interleave("abcde", "xyz", 2)) == ["a", "b", "x", "c", "d", "y", "e", "z"]


def test_a_short_search_sees_several_tiles_and_every_form():
    first = [dict(c) for c in islice(with_prefetch(TILES, offered=True), 8)]
    assert len({c["tile"] for c in first}) >= 5
    assert {(c["pdl"], c["prefetch"]) for c in first} == {(False, False), (True, True), (True, False)}
    assert not any(c["prefetch"] and not c["pdl"] for c in first)


def test_where_launches_cannot_overlap_nothing_is_offered():
    assert [dict(c) for c in with_prefetch(TILES[:1], offered=False)] == [{"tile": 0, "pdl": False, "prefetch": False}]
    assert [dict(c) for c in with_dependent_launch(TILES[:1], offered=False)] == [{"tile": 0, "pdl": False}]
