"""The judge of the fuzzers finds what it is there to find, whatever the case does to its process."""

import fuzz_cases
import pytest
from reliability_trials.judge import judge


@pytest.fixture(scope="module")
def unexpected() -> dict[int, str]:
    tally = judge(fuzz_cases.prepare, fuzz_cases.make, range(10))
    assert tally.cases == 10
    assert (tally.loaded, tally.refused) == (2, 2)  # 0, 8 and 7, 9
    assert tally.kinds["odd"][0] + tally.kinds["even"][0] + tally.kinds["unknown"][0] == 10
    assert tally.slowest_s > 2
    assert tally.largest_mb > 500
    return dict(tally.unexpected)


EXPECTED = {
    1: "odd: ValueError: no such number",
    2: "ended the process with -6",
    3: "odd: took 2.2 s",
    4: "even: took ",
    5: "ended the process with 0",
    6: "even: SystemExit: bye",
}


@pytest.mark.parametrize(("case", "begins"), EXPECTED.items())
def test_what_is_not_expected_is_told(unexpected: dict[int, str], case: int, begins: str):
    assert unexpected[case].startswith(begins)


def test_the_rest_is_fine(unexpected: dict[int, str]):
    assert unexpected.keys() == EXPECTED.keys()
