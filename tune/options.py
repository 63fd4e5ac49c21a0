"""What the caller of `tune` decides. Types only."""

from pathlib import Path

import msgspec

from tune_model.tune.candidate import Effort

__all__ = ["TuneOptions"]


class TuneOptions(msgspec.Struct, frozen=True):
    """How to tune.

    Attributes:
        records_path: The records database (SQLite); made if it does not exist.
        kernels_path: Folder of the store of built kernels; made if it does not exist.
        effort: How much of the space is searched.
        budget_s: Seconds that all measuring may take; when they are over, races in flight end with what they have, and
            what was not searched keeps the baseline. `None` for no limit.
        seed: Of the random inputs and the order of measurements.
        recheck: Measure everything again instead of believing the records.
        build_workers: Build processes.
        build_timeout_s: Longest time one build may take.
        isolate: Measure in a process of its own. Without it a candidate that crashes takes the caller with it.
    """

    records_path: Path
    kernels_path: Path
    effort: Effort = Effort.BALANCED
    budget_s: float | None = None
    seed: int = 0
    recheck: bool = False
    build_workers: int = 1
    build_timeout_s: float = 60.0
    isolate: bool = True
