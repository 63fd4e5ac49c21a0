"""A sample of what `benchmarks/reliability.py` does 25,000 times: mutated input is read as what it says, or refused.

That benchmark holds every case to the 2 s of wall time and 500 MB that are promised. Here other work may have the cores
and the allocator may be another, so seconds on a core count, and the limits are those of a real fault: every case of
today takes less than a second and 25 MB.
"""

from reliability_trials.fuzz import fuzz_artifacts, fuzz_texts
from reliability_trials.judge import Limits, Tally

LIMITS = Limits(seconds=10.0, megabytes=500.0, on_cpu=True)


def require(tally: Tally, cases: int, kinds: int) -> None:
    assert tally.unexpected == []
    assert tally.cases == cases
    assert tally.loaded + tally.refused == cases
    # A fuzzer whose cases are all refused at the door, or all harmless, tests nothing.
    assert 0.03 * cases < tally.loaded < 0.6 * cases
    assert len(tally.kinds) == kinds


def test_mutated_artifacts():
    require(fuzz_artifacts(range(1_000_000, 1_000_350), LIMITS), 350, 11)


def test_mutated_configurations_and_records():
    require(fuzz_texts(range(1_000_000, 1_000_150), LIMITS), 150, 7)
