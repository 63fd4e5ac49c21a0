"""Attention: the tuned choice against masked SDPA, ATen's backends and the bandwidth of the K/V in use.

    PYTHONPATH=src python benchmarks/attention.py                       everything, into benchmarks/results
    PYTHONPATH=src python benchmarks/attention.py --shard decode --seconds 300
    PYTHONPATH=src python benchmarks/attention.py --small --target cpu --save /tmp/small.json

Every row is saved as soon as it is measured; a run skips the rows that are in the file and goes on where the last one
stopped. benchmarks/README.md says what is measured and how.
"""

from typing import TYPE_CHECKING

from attending.summary import summarise
from bench.command import benchmark_command

if TYPE_CHECKING:
    from bench.run import Bench

SHARDS = ("decode", "prefill")


def run(shard: str, bench: "Bench", *, small: bool) -> None:
    """Measure one shard."""
    from attending.rows import run_decode, run_prefill
    from attending.shapes import DECODE, PREFILL, SMALL_DECODE, SMALL_PREFILL

    if shard == "decode":
        run_decode(bench, SMALL_DECODE if small else DECODE)
    else:
        run_prefill(bench, SMALL_PREFILL if small else PREFILL)


main = benchmark_command("attention", SHARDS, run, summarise)

if __name__ == "__main__":
    main()
