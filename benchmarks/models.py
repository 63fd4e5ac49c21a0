"""Architectures: which models can be planned, tuned, packaged and loaded, and compute what the original computes.

    PYTHONPATH=src python benchmarks/models.py --target cpu
    PYTHONPATH=src python benchmarks/models.py --target cpu --shard decoders --only qwen
    PYTHONPATH=src python benchmarks/models.py --target cpu --shard page      # docs/models.md again

Every model runs in a process of its own, and its row is saved as soon as it is there; a run skips the rows that are in
the file. benchmarks/README.md says what is tried and how.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Final

from architectures.summary import summarise
from bench.command import benchmark_command

if TYPE_CHECKING:
    from bench.run import Bench

SHARDS = ("decoders", "text", "vision", "sound", "translators", "page")

_DOCUMENT: Final = Path(__file__).resolve().parent.parent / "docs" / "models.md"


def run(shard: str, bench: "Bench", *, small: bool) -> None:
    """Run one part; `small` tries its first model only."""
    from architectures.decoders import DECODERS
    from architectures.encoders import SOUND, TEXT, TRANSLATORS, VISION
    from architectures.page import page_of
    from architectures.rows import run_architectures

    from tune_model.pipeline.bench.result import read_result

    if shard == "page":
        if bench.ledger.path.resolve().is_relative_to(_DOCUMENT.parents[1]):
            _DOCUMENT.write_text(page_of(read_result(bench.ledger.path)), encoding="utf-8")
        return
    tables = {"decoders": DECODERS, "text": TEXT, "vision": VISION, "sound": SOUND, "translators": TRANSLATORS}
    run_architectures(bench, shard, tables[shard][:1] if small else tables[shard])


main = benchmark_command("models", SHARDS, run, summarise)

if __name__ == "__main__":
    main()
