"""A sample of what `benchmarks/reliability.py` does 25,000 times: mutated input is read as what it says, or refused."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

from reliability_trials.fuzz import fuzz_artifacts, fuzz_texts
from reliability_trials.judge import Tally


def require(tally: Tally, cases: int, kinds: int) -> None:
    assert tally.unexpected == []
    assert tally.cases == cases
    assert tally.loaded + tally.refused == cases
    # A fuzzer whose cases are all refused at the door, or all harmless, tests nothing.
    assert 0.03 * cases < tally.loaded < 0.6 * cases
    assert len(tally.kinds) == kinds


def test_mutated_artifacts():
    require(fuzz_artifacts(range(1_000_000, 1_000_350)), 350, 11)


def test_mutated_configurations_and_records():
    require(fuzz_texts(range(1_000_000, 1_000_150)), 150, 7)
