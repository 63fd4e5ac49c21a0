"""The cases of the two fuzzers, as `judge` wants them."""

from collections.abc import Callable
from pathlib import Path

from reliability_trials.fuzz_artifacts import Material, check_artifact, make_artifact
from reliability_trials.fuzz_texts import Texts, make_text
from reliability_trials.judge import Tally, judge

__all__ = ["fuzz_artifacts", "fuzz_texts"]

_SOUND = Path(__file__).resolve().parents[2] / "tests" / "data"


def fuzz_artifacts(cases: range) -> Tally:
    """Open mutated artifacts and bundles."""
    return judge(_prepare_artifacts, _make_artifact, cases)


def fuzz_texts(cases: range) -> Tally:
    """Read mutated configurations and records."""
    return judge(Texts, make_text, cases)


def _prepare_artifacts(folder: Path) -> tuple[Material, Path]:
    return Material((_SOUND / "schema-1.tuned", _SOUND / "bundle-1.tuned")), folder


def _make_artifact(material: tuple[Material, Path], case: int) -> tuple[str, Callable[[], bool]]:
    place, kind = make_artifact(material[0], case, material[1])
    return kind, lambda: check_artifact(place)
