"""A tune on the CPU with the real families, as a script: `python moved_tune.py RECORDS`; prints what it did as JSON.

Run from copies of the package in other places, for other users on other machines: nothing of that may reach a key.
"""

import getpass
import hashlib
import json
import os
import platform
import socket
import sys
from pathlib import Path


def pretend() -> None:
    """Be on the machine and the user that the environment names, for whoever asks."""
    name = os.environ["PRETENDED_HOST"]
    real = os.uname()
    os.uname = lambda: os.uname_result((real.sysname, name, real.release, real.version, real.machine))  # type: ignore[assignment]
    socket.gethostname = platform.node = lambda: name
    getpass.getuser = lambda: os.environ["USER"]


def main(folder: Path) -> None:
    """Tune two small tasks."""
    pretend()
    import msgspec
    from tuning_fakes import linear_plan

    import tune_model
    from tune_model.tune.candidate import Effort
    from tune_model.tune.machine.probe import probe_target
    from tune_model.tune.options import TuneOptions
    from tune_model.tune.tuner import tune

    options = TuneOptions(folder / "records.sqlite", folder / "kernels", Effort.QUICK, isolate=False)
    tuning = tune(linear_plan(1, 24), probe_target("cpu"), options, lambda _event: None)
    encoded = b"".join(msgspec.json.encode(part) for part in (tuning.plan, tuning.choices, tuning.target))
    found = {
        "package": str(Path(tune_model.__file__).parent),
        "host": platform.node(),
        "builds": tuning.builds,
        "measured": tuning.measured,
        "digest": hashlib.sha256(encoded).hexdigest(),
        "leaks": [
            word for word in (os.environ["HOME"], os.environ["USER"], platform.node()) if word.encode() in encoded
        ],
    }
    sys.stdout.write(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
