"""Matmuls: the tuned choice against the library, torch.compile, a roofline and an exhaustive search.

    PYTHONPATH=src python benchmarks/matmul.py                       everything, into benchmarks/results
    PYTHONPATH=src python benchmarks/matmul.py --shard rows --seconds 540
    PYTHONPATH=src python benchmarks/matmul.py --small --target cpu --save /tmp/small.json

Every row is saved as soon as it is measured; a run skips the rows that are in the file and goes on where the last one
stopped, in the races of a single shape too. benchmarks/README.md says what is measured and how.
"""

import os
import traceback
from pathlib import Path
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from matmuls.run import Bench
    from matmuls.shapes import Suite

SHARDS = ("llama-tuning", "rows", "max-autotune", "epilogues", "regret")
COMMAND = "PYTHONPATH=src python benchmarks/matmul.py"


@click.command()
@click.option("--shard", "shards", multiple=True, type=click.Choice(SHARDS), help="Parts to run; all by default.")
@click.option("--save", "path", type=click.Path(path_type=Path), default=None, help="The result file.")
@click.option(
    "--folder",
    type=click.Path(path_type=Path),
    default=Path("build/benchmark-matmul"),
    show_default=True,
    help="Records and built kernels; a run that finds them tunes nothing twice.",
)
@click.option("--seconds", type=float, default=None, help="Stop cleanly after so long.")
@click.option("--again", is_flag=True, help="Measure rows that are in the file already.")
@click.option("--only", multiple=True, metavar="TEXT", help="Rows whose name holds this: 1x4096x6144. May be repeated.")
@click.option("--target", "spec", default="auto", show_default=True, help="auto, cuda or cpu.")
@click.option("--effort", default="balanced", show_default=True, type=click.Choice(("quick", "balanced", "thorough")))
@click.option("--workers", type=int, default=None, help="Build processes; by default as many as there are cores.")
@click.option("--part", metavar="I/N", default="1/1", help="Every N-th row from the I-th on: one part for each GPU.")
@click.option(
    "--merge",
    "others",
    multiple=True,
    type=click.Path(path_type=Path, exists=True),
    help="Add the rows of this result file and measure nothing.",
)
@click.option("--small", is_flag=True, help="A few tiny shapes, to try the benchmark itself.")
def main(  # noqa: PLR0913, PLR0917 (one parameter per option)
    shards: tuple[str, ...],
    path: Path | None,
    folder: Path,
    seconds: float | None,
    again: bool,
    only: tuple[str, ...],
    spec: str,
    effort: str,
    workers: int | None,
    part: str,
    others: tuple[Path, ...],
    small: bool,
) -> None:
    """Measure matmuls and write one result file."""
    import torch
    from matmuls.ledger import Clock, Ledger
    from matmuls.run import Bench, DeviceBrokenError
    from matmuls.shapes import suite_named
    from matmuls.summary import summarise
    from matmuls.tuned import Shop

    from tune_model.tune.candidate import Effort
    from tune_model.tune.probe import probe_target
    from tune_model.tune.target import CudaTarget

    clock = Clock(seconds)
    target = probe_target(spec)
    device = torch.device("cuda", 0) if isinstance(target, CudaTarget) else torch.device("cpu")
    kind = "h200" if "H200" in target.name else device.type
    place = path or Path(__file__).parent / "results" / f"matmul.{kind}.json"
    ledger = Ledger(place, "matmul", device, COMMAND, summarise)
    for other in others:
        ledger.absorb(other)
    shop = Shop(target, folder, Effort(effort), workers or len(os.sched_getaffinity(0)))
    bench = Bench(ledger, clock, shop, _say, again, only, _part(part))
    suite = suite_named(small=small)
    failed: list[str] = []
    for shard in () if others else shards or SHARDS:
        _say(f"--- {shard}")
        try:
            _run(shard, bench, suite)
        except DeviceBrokenError as error:
            raise click.ClickException(f"the device is lost ({error}); run again to continue") from error
        except Exception:  # noqa: BLE001 (device time is scarce: the other parts still run)
            traceback.print_exc()
            failed.append(shard)
        _say(f"    {clock.spent_s:.0f} s so far")
    ledger.save()
    for key, value in sorted(ledger.summary.items()):
        _say(f"{key:24} {value}")
    if failed:
        raise click.ClickException(f"{', '.join(failed)} ended early, as shown above; run again to continue")


def _run(shard: str, bench: "Bench", suite: "Suite") -> None:
    from matmuls.epilogues import layers, run_epilogues
    from matmuls.llama import run_llama_tuning
    from matmuls.max_autotune import run_max_autotune
    from matmuls.regret import run_regret
    from matmuls.rows import run_rows

    if bench.clock.is_over:
        _say("time is over; run again to continue")
        return
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
            run_regret(bench, suite.regret)


def _part(text: str) -> tuple[int, int]:
    """Read `2/3` as (1, 3): the place of the first row, and the step."""
    first, slash, step = text.partition("/")
    if not (slash and first.isdigit() and step.isdigit() and 1 <= int(first) <= int(step)):
        raise click.BadParameter(f"{text!r}; expected I/N with 1 <= I <= N, as 1/2", param_hint="--part")
    return int(first) - 1, int(step)


def _say(line: str) -> None:
    print(line, flush=True)


if __name__ == "__main__":
    main()
