import itertools
from collections.abc import Sequence

from tune_model.tune.candidate import Config
from tune_model.tune.search.descent import Rules, descend, diagonals, neighbours

SPACE: list[Config] = [
    (("block", block), ("warps", warps), ("hint", hint))
    for block, warps, hint in itertools.product([64, 256, 128, 512], [1, 2, 4, 8], ["none", "first"])
    if block * warps < 4096
]


def cost(config: Config) -> float:
    values = dict(config)
    return abs(int(values["block"]) - 256) / 64 + abs(int(values["warps"]) - 4) + (values["hint"] == "none") * 0.5 + 1


def ignore(_configs: Sequence[Config]) -> None: ...


def test_neighbours_differ_by_one_notch_and_are_legal():
    here = (("block", 512), ("warps", 4), ("hint", "none"))
    assert set(neighbours(here, SPACE)) == {
        (("block", 256), ("warps", 4), ("hint", "none")),
        (("block", 512), ("warps", 2), ("hint", "none")),
        (("block", 512), ("warps", 4), ("hint", "first")),
    }  # 512 x 8 is not in the space


def test_it_reaches_the_best_without_timing_everything():
    asked: list[Config] = []

    def time(config: Config) -> float:
        asked.append(config)
        return cost(config)

    found = descend(SPACE[0], SPACE, time, ignore).found
    assert found[0] == min(SPACE, key=cost)
    assert len(asked) == len(set(asked)) < len(SPACE)
    assert [cost(c) for c in found] == sorted(cost(c) for c in asked)


def test_neighbourhoods_are_announced_before_they_are_timed():
    announced: set[Config] = set()

    def time(config: Config) -> float:
        assert config in announced
        return cost(config)

    descend(SPACE[0], SPACE, time, announced.update)


def test_configurations_that_are_out_are_walked_around():
    def time(config: Config) -> float | None:
        return None if dict(config)["block"] == 64 else cost(config)

    found = descend(SPACE[0], SPACE, time, ignore).found
    assert found[0] == min(SPACE, key=cost)


def test_all_out_ends():
    assert descend(SPACE[0], SPACE, lambda _c: None, ignore).found == []


def test_gains_below_the_threshold_do_not_keep_it_walking():
    space: list[Config] = [(("n", n),) for n in range(100)]
    asked: list[Config] = []

    def time(config: Config) -> float:
        asked.append(config)
        return 100.0 - 0.01 * int(config[0][1])

    descend(space[0], space, time, ignore)
    assert len(asked) == 2


def test_diagonals_differ_in_two_parameters():
    here = (("block", 256), ("warps", 2), ("hint", "none"))
    assert set(diagonals(here, SPACE)) == {
        (("block", block), ("warps", warps), ("hint", "none")) for block in (128, 512) for warps in (1, 4)
    } | {(("block", block), ("warps", 2), ("hint", "first")) for block in (128, 512)} | {
        (("block", 256), ("warps", warps), ("hint", "first")) for warps in (1, 4)
    }


def test_every_step_leaves_a_footprint():
    """What was timed is exactly what the footprints tell, and each goes where the next one stands."""
    timed: list[Config] = []

    def time(config: Config) -> float:
        timed.append(config)
        return cost(config)

    found, footprints = descend(SPACE[0], SPACE, time, ignore)
    told = [footprints[0].at.config, *(tried.config for step in footprints for tried in step.tried)]
    assert told == timed
    assert [step.to for step in footprints[:-1]] == [step.at.config for step in footprints[1:]]
    assert footprints[-1].to is None
    assert footprints[-1].at.config == found[0]
    assert all(tried.time_us == cost(tried.config) for step in footprints for tried in step.tried)


RIDGE: list[Config] = [(("x", x), ("y", y)) for x, y in itertools.product(range(8), range(8))]


def ridge(config: Config) -> float:
    """Only both parameters at once lead down."""
    x, y = (int(value) for _, value in config)
    return 10.0 + 5.0 * abs(x - y) - min(x, y)


def test_diagonals_walk_along_a_ridge():
    assert ridge(descend(RIDGE[0], RIDGE, ridge, ignore).found[0]) == 10.0
    found, footprints = descend(RIDGE[0], RIDGE, ridge, ignore, Rules(diagonals=True))
    assert found[0] == (("x", 7), ("y", 7))
    assert [step.around for step in footprints[:2]] == ["neighbours", "diagonals"]


SWITCHED: list[Config] = [
    (("splits", splits), ("last_joins", last), ("pdl", pdl))
    for splits, last, pdl in itertools.product((1, 2, 4), (False, True), (False, True))
]


def test_who_joins_is_decided_together_with_a_dependent_launch():
    """Alone each of them loses, as for the sum of eight long rows on an H200."""

    def time(config: Config) -> float:
        splits, last, pdl = (int(value) for _, value in config)
        return {(1, 0): 2.4, (1, 1): 2.7, (0, 0): 2.6, (0, 1): 2.1}[last, pdl] + 0.1 * abs(splits - 2)

    start = (("splits", 2), ("last_joins", True), ("pdl", False))
    best = (("splits", 2), ("last_joins", False), ("pdl", True))
    assert descend(start, SWITCHED, time, ignore).found[0] == best


def test_the_switches_of_the_next_best_are_turned():
    """A softmax of many short rows on an H200: the tile that a dependent launch suits best comes second without it."""
    space: list[Config] = [(("x", x), ("pdl", pdl)) for x, pdl in itertools.product(range(6), (False, True))]
    times = {(0, 0): 6.40, (1, 0): 6.29, (2, 0): 6.50, (3, 0): 6.30, (3, 1): 5.92, (1, 1): 6.40}

    def time(config: Config) -> float:
        x, pdl = (int(value) for _, value in config)
        return times.get((x, pdl), 7.0)

    start = (("x", 1), ("pdl", False))
    known = [start, (("x", 3), ("pdl", False))]
    assert descend(start, space, time, ignore).found[0] == start
    near = [c for c in space if c[0][1] != 2]  # 3 is the next notch of 1 here
    found, footprints = descend(start, near, time, ignore, Rules(switches=2))
    assert found[0] == (("x", 3), ("pdl", True))
    assert [step.around for step in footprints][:2] == ["neighbours", "switches"]
    assert {c.config for c in footprints[1].tried} <= {(*c[:1], ("pdl", True)) for c in known}


def hills(config: Config) -> float:
    """Two valleys; the one at the far end is deeper."""
    x, y = (int(value) for _, value in config)
    return min(2.0 + abs(x - 1) + abs(y - 1), 1.0 + abs(x - 6) + abs(y - 6))


def test_a_restart_finds_the_other_valley():
    assert hills(descend(RIDGE[0], RIDGE, hills, ignore).found[0]) == 2.0
    asked: list[Config] = []

    def time(config: Config) -> float:
        asked.append(config)
        return hills(config)

    found, footprints = descend(RIDGE[0], RIDGE, time, ignore, Rules(restarts=2))
    assert found[0] == (("x", 6), ("y", 6))
    assert [step.descent for step in footprints] == sorted(step.descent for step in footprints)
    assert footprints[-1].descent >= 1
    assert len(asked) == len(set(asked)) < len(RIDGE)


def test_a_walk_ends_when_it_has_asked_for_so_many():
    for most in range(1, 12):
        asked: list[Config] = []
        announced: list[Config] = []

        def time(config: Config, asked: list[Config] = asked) -> float:
            asked.append(config)
            return cost(config)

        rules = Rules(diagonals=True, restarts=2, most=most)
        found, footprints = descend(SPACE[0], SPACE, time, announced.extend, rules)
        assert asked == announced
        assert len(asked) == most
        assert cost(found[0]) == min(map(cost, asked))
        assert footprints[0].at.config == SPACE[0]
    assert descend(SPACE[0], SPACE, lambda _c: None, ignore, Rules(most=3)).found == []


def test_a_hopeless_restart_is_given_up():
    """Attention's restarts walked on for seconds a step, far behind, and found nothing in 18 races on an H200."""

    def steps(rules: Rules) -> list[int]:
        return [step.descent for step in descend(RIDGE[0], RIDGE, hills, ignore, rules).footprints]

    assert steps(Rules(restarts=1)).count(1) > 1
    assert steps(Rules(restarts=1, hopeless=0.1)).count(1) == 1
    assert steps(Rules(restarts=1, hopeless=0.1)).count(0) == steps(Rules(restarts=1)).count(0)


def test_a_prefetch_is_one_step_from_an_ordinary_launch():
    """It needs the dependent launch, which alone may gain nothing: (off, off) to (on, on) was two steps."""
    forms = [(False, False), (True, False), (True, True)]
    space: list[Config] = [(("block", b), ("pdl", p), ("prefetch", f)) for b in (64, 128) for p, f in forms]
    assert set(neighbours(space[0], space)) == {space[1], space[2], space[3]}
    assert set(neighbours(space[2], space)) == {space[0], space[1], space[5]}

    def time(config: Config) -> float:
        values = dict(config)
        return 10.0 + values["pdl"] - 3.0 * values["prefetch"]

    assert descend(space[0], space, time, ignore).found[0] in {space[2], space[5]}
