"""A tune that takes a while, for tests that end it with a signal: `python slow_tune.py FOLDER`."""

import sys
import time
from pathlib import Path

from tuning_fakes import TARGET, FakeFamily, RecordedDevice, linear_plan

from tune_model.tune.candidate import Built, Candidate, Rejected
from tune_model.tune.device import Samples
from tune_model.tune.events import Event
from tune_model.tune.families.aten import FAMILY as ATEN
from tune_model.tune.measuring.policy import Rung
from tune_model.tune.options import TuneOptions


class Slow(RecordedDevice):
    """Takes a tenth of a second per timing."""

    def time(self, candidate: Candidate, built: Built, rung: Rung) -> Samples | Rejected:
        time.sleep(0.1)
        return super().time(candidate, built, rung)


def main(folder: Path) -> None:
    """Tune, telling the parent after every event."""
    # Here, because build processes import this file too and need no torch.
    from tune_model.tune.tuner import tune_with
    from tune_model.tune.workshop import Workshop

    family = FakeFamily("fast", tuple((("n", n),) for n in range(40)))
    options = TuneOptions(folder / "records.sqlite", folder / "kernels", build_workers=2)

    def tell(event: Event) -> None:
        print(type(event).__name__, flush=True)  # noqa: T201 (a message to the test)

    tuning = tune_with(
        linear_plan(1, 8), Workshop((ATEN, family), TARGET, Slow({"aten": 10.0, "fast": 5.0}), options, tell)
    )
    print(f"stopped={tuning.stopped} measured={tuning.measured}", flush=True)  # noqa: T201 (a message to the test)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
