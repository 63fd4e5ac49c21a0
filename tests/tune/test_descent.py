import itertools
from collections.abc import Sequence

from tune_model.tune.candidate import Config
from tune_model.tune.descent import descend, neighbours

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

    found = descend(SPACE[0], SPACE, time, ignore)
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

    found = descend(SPACE[0], SPACE, time, ignore)
    assert found[0] == min(SPACE, key=cost)


def test_all_out_ends():
    assert descend(SPACE[0], SPACE, lambda _c: None, ignore) == []


def test_gains_below_the_threshold_do_not_keep_it_walking():
    space: list[Config] = [(("n", n),) for n in range(100)]
    asked: list[Config] = []

    def time(config: Config) -> float:
        asked.append(config)
        return 100.0 - 0.01 * int(config[0][1])

    descend(space[0], space, time, ignore)
    assert len(asked) == 2
