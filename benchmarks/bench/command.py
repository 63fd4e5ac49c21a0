"""The command line that all benchmarks share: shards, a result file, a budget, and one machine after the other."""

import os
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import click

if TYPE_CHECKING:
    from bench.ledger import Ledger
    from bench.run import Bench

__all__ = ["RunShard", "benchmark_command"]

_RESULTS = Path(__file__).parent.parent / "results"

Summarise = Callable[[list[dict[str, Any]]], Mapping[str, float]]


class RunShard(Protocol):
    """Measures one shard until it is done or the time is over."""

    def __call__(self, shard: str, bench: "Bench", *, small: bool) -> None:
        """Measure what is missing; `small` takes seconds on a CPU."""


def benchmark_command(
    name: str,
    shards: Sequence[str],
    run: RunShard,
    summarise: Summarise,
) -> click.Command:
    """Return the command of a benchmark.

    Args:
        name: Of the benchmark, its script and its result file.
        shards: Its parts, in the order they are run.
        run: Measures one.
        summarise: Makes the flat figures of the rows.
    """

    @click.command(help=f"Measure {name} and write one result file.")
    @click.option("--shard", "chosen", multiple=True, type=click.Choice(shards), help="Parts to run; all by default.")
    @click.option("--save", "path", type=click.Path(path_type=Path), default=None, help="The result file.")
    @click.option(
        "--folder",
        type=click.Path(path_type=Path),
        default=Path(f"build/benchmark-{name}"),
        show_default=True,
        help="Records and built kernels; a run that finds them tunes nothing twice.",
    )
    @click.option("--seconds", type=float, default=None, help="Stop cleanly after so long.")
    @click.option("--again", is_flag=True, help="Measure rows that are in the file already.")
    @click.option("--only", multiple=True, metavar="TEXT", help="Rows whose name holds this. May be repeated.")
    @click.option("--target", "spec", default="auto", show_default=True, help="auto, cuda or cpu.")
    @click.option(
        "--effort", default="balanced", show_default=True, type=click.Choice(("quick", "balanced", "thorough"))
    )
    @click.option("--workers", type=int, default=None, help="Build processes; by default as many as there are cores.")
    @click.option(
        "--part",
        default="1/1",
        show_default=True,
        metavar="I/N",
        help="Every Nth row, from the Ith: equal machines share a shard, each with a --save and a --folder of its own.",
    )
    @click.option(
        "--merge",
        "others",
        multiple=True,
        type=click.Path(path_type=Path, exists=True),
        help="Measure nothing; add the rows of this file to that of --save. May be repeated.",
    )
    @click.option("--small", is_flag=True, help="A few tiny shapes, to try the benchmark itself.")
    def main(  # noqa: PLR0913, PLR0917 (one parameter per option)
        chosen: tuple[str, ...],
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
        import torch

        from bench.ledger import Clock, Ledger, head_here
        from bench.run import Bench
        from bench.tuned import Shop
        from tune_model.tune.candidate import Effort
        from tune_model.tune.machine.probe import probe_target
        from tune_model.tune.target import CudaTarget

        if others:
            if chosen or only or again or path is None:
                raise click.UsageError(
                    "--merge measures nothing: it goes with --save, and without --shard, --only, --again"
                )
            with _said():
                _tell_summary(_merged(path, name, others, summarise))
            return
        clock = Clock(seconds)
        target = probe_target(spec)
        device = torch.device("cuda", 0) if isinstance(target, CudaTarget) else torch.device("cpu")
        command = f"PYTHONPATH=src python benchmarks/{name}.py"
        if device.type == "cpu":
            command += " --target cpu"
        if effort != "balanced":
            command += f" --effort {effort}"
        head = head_here(name, device, command)
        kind = "h200" if "H200" in head.device else device.type
        with _said():
            ledger = Ledger(path or _RESULTS / f"{name}.{kind}.json", head, lambda rows: dict(summarise(rows)))
        shop = Shop(target, folder, Effort(effort), workers or len(os.sched_getaffinity(0)))
        bench = Bench(ledger, clock, shop, _say, again, only, _part(part))
        failed = _run_all(chosen or shards, bench, lambda shard: run(shard, bench, small=small))
        ledger.save()
        _tell_summary(ledger)
        if failed:
            raise click.ClickException(f"{', '.join(failed)} ended early, as shown above; run again to continue")

    return main


@contextmanager
def _said() -> Iterator[None]:
    """Say in one line what is wrong with a file."""
    from tune_model.runtime.errors import TuneModelError

    try:
        yield
    except (TuneModelError, OSError) as error:
        raise click.ClickException(" ".join(str(error).split())) from error


def _merged(place: Path, name: str, others: Sequence[Path], summarise: Summarise) -> "Ledger":
    """Add files' rows, and their complete races, to a result; needs nothing of the machine they are from."""
    from bench.ledger import Ledger, head_of
    from bench.races import Races, races_path

    head = head_of([*([place] if place.exists() else []), *others], name)
    ledger = Ledger(place, head, lambda rows: dict(summarise(rows)))
    races = [path for path in map(races_path, others) if path.exists()]
    if races:
        Races(races_path(place), head).absorb(*races)
    ledger.absorb(*others)
    return ledger


def _tell_summary(ledger: "Ledger") -> None:
    for key, value in sorted(ledger.summary.items()):
        _say(f"{key:24} {value}")


def _run_all(shards: Sequence[str], bench: "Bench", run: Callable[[str], None]) -> list[str]:
    """Run shards until the time is over; returns those that ended early."""
    from bench.run import DeviceBrokenError

    failed: list[str] = []
    for shard in shards:
        _say(f"--- {shard}")
        try:
            if bench.clock.is_over:
                _say("time is over; run again to continue")
            else:
                run(shard)
        except DeviceBrokenError as error:
            raise click.ClickException(f"the device is lost ({error}); run again to continue") from error
        except Exception:  # noqa: BLE001 (device time is scarce: the other parts still run)
            traceback.print_exc()
            failed.append(shard)
        _say(f"    {bench.clock.spent_s:.0f} s so far")
    return failed


def _part(text: str) -> tuple[int, int]:
    """Read `2/3` as (1, 3): the place of the first row, and the step."""
    first, slash, step = text.partition("/")
    if not (slash and first.isdigit() and step.isdigit() and 1 <= int(first) <= int(step)):
        raise click.BadParameter(f"{text!r}; expected I/N with 1 <= I <= N, as 1/2", param_hint="--part")
    return int(first) - 1, int(step)


def _say(line: str) -> None:
    print(line, flush=True)
