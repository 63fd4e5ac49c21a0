import random

import pytest

from tune_model.tune.measuring.interval import drifted, paired_ratio, percentile


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
