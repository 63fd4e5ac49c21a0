import math
import random

import pytest

from tune_model.tune.measuring.interval import (
    FEWEST_PAIRS,
    bounds,
    chance_of_fewer,
    drifted,
    log_deviation,
    log_deviation_of_sum,
    paired_ratio,
    percentile,
    significant,
)


def test_percentiles_interpolate():
    assert percentile([3.0, 1.0, 2.0], 0.5) == 2.0
    assert percentile([1.0, 2.0], 0.5) == 1.5
    assert percentile([5.0], 0.2) == 5.0
    with pytest.raises(ValueError, match="no values"):
        percentile([], 0.5)


def test_the_interval_holds_the_truth_as_often_as_it_says():
    chance = random.Random(7)  # noqa: S311 (repeatable noise)
    inside = 0
    for _ in range(400):
        extern = [10 * chance.lognormvariate(0, 0.05) for _ in range(31)]
        tuned = [8 * chance.lognormvariate(0, 0.05) for _ in range(31)]
        ratio = paired_ratio(extern, tuned)
        assert ratio.low <= ratio.median <= ratio.high
        inside += ratio.low <= 1.25 <= ratio.high
    assert 0.93 <= inside / 400 <= 1.0


@pytest.mark.parametrize("count", range(FEWEST_PAIRS, 61))
def test_whatever_the_noise_the_interval_is_of_95_percent_and_no_wider_than_it_must_be(count: int):
    """The median lies below the k-th of n pairs when fewer than k coins of n show heads, whatever the distribution."""
    ratio = paired_ratio([float(n) for n in range(1, count + 1)], [1.0] * count)
    rank = round(ratio.low) - 1
    assert ratio.high == count - rank

    def missed(rank: int) -> float:
        return 2 * sum(math.comb(count, k) for k in range(rank + 1)) * 0.5**count

    assert missed(rank) <= 0.05 < missed(rank + 1)


def test_the_chance_of_a_slowdown_is_that_of_the_sign_test():
    before, after = [10.0] * 9, [11.0] * 9
    assert chance_of_fewer(before, after, 1.0) == 0.5**9
    assert chance_of_fewer(before, [*after[:8], 9.0], 1.0) == 10 * 0.5**9
    assert chance_of_fewer(before, after, 0.9) == 1.0  # a tenth slower is no more than a tenth
    assert chance_of_fewer(after, before, 1.0) == 1.0


def test_of_many_findings_without_a_cause_none_holds_in_95_of_100_cases():
    """Each asked alone, one of forty is found when there is nothing."""
    dice = random.Random(5)  # noqa: S311 (repeatable noise)
    alone = together = 0
    for _ in range(400):
        chances = [dice.random() for _ in range(40)]
        alone += min(chances) <= 0.05
        together += any(significant(chances))
    assert alone / 400 > 0.8
    assert together / 400 < 0.08


def test_findings_with_a_cause_hold_beside_others():
    assert significant([0.5, 0.001, 0.012, 0.9, 0.03]) == (False, True, True, False, False)
    assert significant([0.02, 0.02]) == (True, True)
    assert significant([]) == ()


def test_errors_of_tasks_measured_apart_add_up_by_their_squares():
    one = log_deviation(0.9, 1.1)
    assert bounds(1.0, one) == (pytest.approx(0.9045, abs=1e-4), pytest.approx(1.1055, abs=1e-4))
    assert log_deviation(1.0, 1.0) == log_deviation(0.0, 1.0) == 0.0
    assert log_deviation_of_sum([(1.0, one)] * 4) == pytest.approx(one / 2)
    assert log_deviation_of_sum([(3.0, 0.3), (4.0, 0.4)]) == pytest.approx(math.hypot(0.9, 1.6) / 7.0)
    assert log_deviation_of_sum([]) == 0.0


def test_equal_times_are_never_a_gain():
    chance = random.Random(3)  # noqa: S311 (repeatable noise)
    surely_faster = 0
    for _ in range(400):
        times = [[10 * chance.lognormvariate(0, 0.05) for _ in range(31)] for _ in range(2)]
        surely_faster += paired_ratio(*times).low > 1.0
    assert surely_faster / 400 < 0.05


def test_drift_common_to_a_round_cancels_and_wild_samples_do_not_matter():
    speeds = [1.0 + 0.02 * i for i in range(21)]
    extern = [10 * s for s in speeds]
    tuned = [9 * s for s in speeds]
    tuned[4] = 500.0
    ratio = paired_ratio(extern, tuned)
    assert ratio.low == pytest.approx(10 / 9)
    assert ratio.high == pytest.approx(10 / 9)


def test_few_pairs_give_their_whole_range():
    ratio = paired_ratio([2.0, 3.0, 4.0], [1.0, 1.0, 1.0])
    assert (ratio.low, ratio.high) == (2.0, 4.0)


def test_drift_is_seen():
    assert drifted([1.0] * 10 + [1.1] * 10)
    assert not drifted([1.0, 1.02] * 10)
    assert not drifted([1.0, 2.0])
