"""Whole models as a server runs them, beside what their users have today.

    PYTHONPATH=src python benchmarks/serving.py                                  everything that the device can measure
    PYTHONPATH=src python benchmarks/serving.py --shard decode --seconds 540     one part, stopping cleanly in time
    PYTHONPATH=src python benchmarks/serving.py --small --target cpu --effort quick --save /tmp/small.json

Every row is saved as soon as it is measured; a run skips the rows that are in the file and goes on where the last one
stopped. benchmarks/README.md says what is measured and how.
"""

from typing import TYPE_CHECKING

from bench.command import benchmark_command
from deployment.summary import summarise

if TYPE_CHECKING:
    from bench.run import Bench

SHARDS = ("tuning", "decode", "prefill", "load", "attach", "logits", "encoders", "server")
ON_A_CPU = frozenset({"encoders", "server"})
ON_A_GPU = frozenset(SHARDS) - {"server"}


def run(shard: str, bench: "Bench", *, small: bool) -> None:
    """Measure one shard."""
    from bench.run import TimeOverError

    from tune_model.tune.target import CudaTarget

    if not small and shard not in (ON_A_GPU if isinstance(bench.shop.target, CudaTarget) else ON_A_CPU):
        bench.tell("not for this kind of device")
        return
    try:
        _measure(shard, bench, small=small)
    except TimeOverError:
        bench.tell("time is over; run again to continue")


def _measure(shard: str, bench: "Bench", *, small: bool) -> None:
    from deployment.artifacts import tuned_artifact
    from deployment.attaching import run_attach, run_logits
    from deployment.decoding import run_decode, run_prefill
    from deployment.encoding import run_encoders
    from deployment.models import llama
    from deployment.serving import run_server
    from deployment.starting import run_start

    match shard:
        case "tuning":
            tuned_artifact(bench, llama(small=small))
        case "decode":
            run_decode(bench, small=small)
        case "prefill":
            run_prefill(bench, small=small)
        case "load":
            run_start(bench, small=small)
        case "attach":
            run_attach(bench, small=small)
        case "logits":
            run_logits(bench, small=small)
        case "encoders":
            run_encoders(bench, small=small)
        case _:
            run_server(bench, small=small)


main = benchmark_command("serving", SHARDS, run, summarise)

if __name__ == "__main__":
    main()
