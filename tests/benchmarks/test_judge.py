"""The judge of the fuzzers finds what it is there to find, whatever the case does to its process."""

import re

import fuzz_cases
import pytest
from reliability_trials.judge import PROMISED, Tally, _measured, judge


@pytest.fixture(scope="module")
def unexpected() -> dict[int, str]:
    tally = judge(fuzz_cases.prepare, fuzz_cases.make, range(10), fuzz_cases.LIMITS)
    assert tally.cases == 10
    assert (tally.loaded, tally.refused) == (2, 2)  # 0, 8 and 7, 9
    assert tally.kinds["odd"][0] + tally.kinds["even"][0] + tally.kinds["unknown"][0] == 10
    assert tally.slowest_s >= fuzz_cases.LIMITS.seconds
    assert tally.largest_mb >= fuzz_cases.LIMITS.megabytes
    return dict(tally.unexpected)


EXPECTED = {
    1: r"odd: ValueError: no such number",
    2: r"ended the process with -6",
    3: r"odd: took \d+\.\d s$",
    4: r"even: took \d+ MB$",
    5: r"ended the process with 0",
    6: r"even: SystemExit: bye",
}


@pytest.mark.parametrize(("case", "begins"), EXPECTED.items())
def test_what_is_not_expected_is_told(unexpected: dict[int, str], case: int, begins: str):
    assert re.match(begins, unexpected[case])


def test_the_rest_is_fine(unexpected: dict[int, str]):
    assert unexpected.keys() == EXPECTED.keys()


@pytest.mark.parametrize(
    ("took", "said"),
    [
        ((1.99, 499.0), None),
        ((2.0, 0.0), "kind: took 2.0 s"),
        ((0.0, 500.0), "kind: took 500 MB"),
    ],
)
@pytest.mark.parametrize("outcome", ["loaded", "refused"])
def test_what_is_promised_of_any_input(took: tuple[float, float], said: str | None, outcome: str):
    assert (PROMISED.seconds, PROMISED.megabytes, PROMISED.on_cpu) == (2.0, 500.0, False)
    tally = Tally()
    tally.add(7, "kind", outcome, took)
    assert tally.unexpected == ([] if said is None else [(7, said)])
    assert tally.loaded + tally.refused == (said is None)


def test_seconds_are_those_of_the_clock_that_is_asked():
    ticks = iter((5.0, 7.5))
    outcome, (seconds, megabytes) = _measured("kind", lambda: True, lambda: next(ticks))
    assert (outcome, seconds, megabytes >= 0) == ("loaded", 2.5, True)
