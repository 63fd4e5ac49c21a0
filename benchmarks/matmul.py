"""Matmuls: the tuned choice against the library, torch.compile, a roofline and an exhaustive search.

    PYTHONPATH=src python benchmarks/matmul.py                       everything, into benchmarks/results
    PYTHONPATH=src python benchmarks/matmul.py --shard rows --seconds 540
    PYTHONPATH=src python benchmarks/matmul.py --small --target cpu --save /tmp/small.json

Every row is saved as soon as it is measured; a run skips the rows that are in the file and goes on where the last one
stopped, in the races of a single shape too. benchmarks/README.md says what is measured and how.
"""

from typing import TYPE_CHECKING

from bench.command import benchmark_command
from matmuls.summary import summarise

if TYPE_CHECKING:
    from bench.run import Bench

SHARDS = ("llama-tuning", "rows", "max-autotune", "epilogues", "regret")


def run(shard: str, bench: "Bench", *, small: bool) -> None:
    """Measure one shard."""
    from bench.exhaustive import run_regret
    from matmuls.epilogues import layers, run_epilogues
    from matmuls.llama import run_llama_tuning
    from matmuls.max_autotune import run_max_autotune
    from matmuls.rows import run_rows
    from matmuls.shapes import suite_named
    from matmuls.subjects import subjects_of

    suite = suite_named(small=small)
    match shard:
        case "llama-tuning":
            run_llama_tuning(bench, suite.scale)
        case "rows":
            run_rows(bench, suite.rows)
        case "max-autotune":
            run_max_autotune(bench, suite.max_autotune)
        case "epilogues":
            run_epilogues(bench, layers(suite.epilogue_rows, suite.scale))
        case "regret":
            run_regret(bench, subjects_of(suite.regret))


main = benchmark_command("matmul", SHARDS, run, summarise)

if __name__ == "__main__":
    main()
