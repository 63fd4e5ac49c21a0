"""Reliability: kills, hostile candidates, shared records, planted winners and mutated input.

    PYTHONPATH=src python benchmarks/reliability.py                     on this machine's GPU, or its CPU
    PYTHONPATH=src python benchmarks/reliability.py --target cpu --shard fuzz-artifacts --seconds 540
    PYTHONPATH=src python benchmarks/reliability.py --small --target cpu --save /tmp/small.json

Every row is saved as soon as it is there; a run skips the rows that are in the file and goes on where the last one
stopped. benchmarks/README.md says what is tried and how.
"""

from typing import TYPE_CHECKING, Final

from bench.command import benchmark_command
from reliability_trials.summary import summarise

if TYPE_CHECKING:
    from bench.run import Bench

SHARDS = ("kills", "hostile", "winners", "sharing", "fuzz-artifacts", "fuzz-texts")

_SIZES: Final = ((1, 64, 128), (8, 96, 64), (16, 48, 192))
_BLOCK: Final = 500


def run(shard: str, bench: "Bench", *, small: bool) -> None:
    """Run one part."""
    match shard:
        case "kills":
            from reliability_trials.kills import KILLS, run_kills

            run_kills(bench, 2 if small else KILLS)
        case "hostile":
            from reliability_trials.hostility import run_hostility

            run_hostility(bench, _SIZES[:1] if small else _SIZES)
        case "winners":
            from reliability_trials.planted import run_planted

            run_planted(bench, _SIZES[:1] if small else _SIZES)
        case "sharing":
            from reliability_trials.sharing import run_sharing

            run_sharing(bench, 1 if small else 3)
        case _:
            from reliability_trials.fuzz import run_fuzz

            total = {"fuzz-artifacts": 20_000, "fuzz-texts": 5_000}[shard]
            run_fuzz(bench, shard, 100 if small else total, 100 if small else _BLOCK)


main = benchmark_command("reliability", SHARDS, run, summarise)

if __name__ == "__main__":
    main()
