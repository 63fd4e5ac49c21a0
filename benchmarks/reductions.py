"""Reductions and the pointwise work around them: tuned against eager, torch.compile and an exhaustive search.

    PYTHONPATH=src python benchmarks/reductions.py                       everything, into benchmarks/results
    PYTHONPATH=src python benchmarks/reductions.py --shard rows --seconds 540
    PYTHONPATH=src python benchmarks/reductions.py --small --target cpu --save /tmp/small.json

Every row is saved as soon as it is measured; a run skips the rows that are in the file and goes on where the last one
stopped. benchmarks/README.md says what is measured and how.
"""

from typing import TYPE_CHECKING

from bench.command import benchmark_command
from reducing.summary import summarise

if TYPE_CHECKING:
    from bench.run import Bench

SHARDS = ("rows", "regret")


def run(shard: str, bench: "Bench", *, small: bool) -> None:
    """Measure one shard."""
    from bench.exhaustive import run_regret
    from reducing.rows import run_rows
    from reducing.shapes import LARGE, REGRET, SMALL, SMALL_REGRET, subjects_of

    if shard == "rows":
        run_rows(bench, SMALL if small else LARGE)
    else:
        run_regret(bench, subjects_of(SMALL_REGRET if small else REGRET), tunings=2)


main = benchmark_command("reductions", SHARDS, run, summarise)

if __name__ == "__main__":
    main()
