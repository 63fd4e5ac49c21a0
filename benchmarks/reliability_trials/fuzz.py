"""The cases of the two fuzzers, as `judge` wants them."""

from collections.abc import Callable
from pathlib import Path

import msgspec
from bench.run import Bench, attempt

from reliability_trials.fuzz_artifacts import Material, check_artifact, make_artifact
from reliability_trials.fuzz_texts import Texts, make_text
from reliability_trials.judge import PROMISED, Limits, Tally, judge

__all__ = ["fuzz_artifacts", "fuzz_texts", "run_fuzz"]

_SOUND = Path(__file__).resolve().parents[2] / "tests" / "data"


def fuzz_artifacts(cases: range, limits: Limits = PROMISED) -> Tally:
    """Open mutated artifacts and bundles."""
    return judge(_prepare_artifacts, _make_artifact, cases, limits)


def fuzz_texts(cases: range, limits: Limits = PROMISED) -> Tally:
    """Read mutated configurations and records."""
    return judge(Texts, make_text, cases, limits)


def _prepare_artifacts(folder: Path) -> tuple[Material, Path]:
    sound = (_SOUND / "schema-1.tuned", _SOUND / "bundle-1.tuned")
    for path in sound:  # what is imported on first use is not a case's doing
        if not check_artifact(path):
            raise ValueError(f"{path} is refused before anything was done to it")
    return Material(sound), folder


def _make_artifact(material: tuple[Material, Path], case: int) -> tuple[str, Callable[[], bool]]:
    place, kind = make_artifact(material[0], case, material[1])
    return kind, lambda: check_artifact(place)


def run_fuzz(bench: Bench, shard: str, total: int, block: int) -> None:
    """Write a row for each block of cases."""
    fuzz = fuzz_artifacts if shard == "fuzz-artifacts" else fuzz_texts
    for start in range(0, total, block):
        name = f"{start} to {start + block - 1}"
        if bench.clock.is_over:
            bench.tell("time is over; run again to continue")
            return
        if not bench.wants(shard, name):
            continue
        row = attempt(bench, shard, name, lambda s=start: msgspec.to_builtins(fuzz(range(s, s + block))))  # type: ignore[misc]
        if row is not None:
            bench.tell(
                f"  {name}: {row['loaded']} loaded, {row['refused']} refused, {len(row['unexpected'])} unexpected, "
                f"at most {row['slowest_s']:.2f} s and {row['largest_mb']:.0f} MB"
            )
