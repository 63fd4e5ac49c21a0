"""`tune-model bench ARTIFACT`: the tuned model beside eager PyTorch and `torch.compile`, interleaved in one run."""

import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from tune_model.pipeline.options import artifact_argument, verify_key_option, weights_option

if TYPE_CHECKING:
    import torch
    from torch import nn

    from tune_model.package.read import Artifact
    from tune_model.package.signature import VerifyKey
    from tune_model.pipeline.bench.interleave import Timing
    from tune_model.pipeline.bench.points import Point

__all__ = ["command"]

HELP = """Time the tuned model of ARTIFACT beside what you would run without it, in one process, interleaved.

Peers on a GPU: eager, eager in a CUDA graph, what torch.compile(mode="max-autotune") finds in one CUDA graph, and that
mode as it is called, with graphs of its own. On a CPU: eager, torch.compile with freezing. Every point of the
workload's grid is timed; a peer's row says how much slower it is than the tuned model.

\b
  tune-model bench llama-3-8b.tuned
  tune-model bench llama-3-8b.tuned --only decode --only "prefill batch=1 sequence=2048"
  tune-model bench minilm.tuned --weights ./all-MiniLM-L6-v2 --save benchmarks/results/minilm.cpu.json

With --save a long benchmark can run in parts: rows of points timed now replace their old ones, others stay.
"""


@click.command("bench", help=HELP)
@artifact_argument
@weights_option
@click.option("--device", "device_name", default=None, help="Where to run; by default the kind it was tuned for.")
@click.option(
    "--only", multiple=True, metavar="POINT", help="Time only points that begin with these words; repeatable."
)
@click.option("--rounds", default=50, show_default=True, type=click.IntRange(6, 10_000), help="Rounds per point.")
@click.option("--no-compile", is_flag=True, help="Leave torch.compile out: it takes minutes for a large model.")
@verify_key_option
@click.option("--save", "save_path", metavar="FILE", default=None, help="Write or update a benchmark result (JSON).")
def command(  # noqa: PLR0913, PLR0917 - one parameter per option
    artifact_path: str,
    weights_path: str | None,
    device_name: str | None,
    only: tuple[str, ...],
    rounds: int,
    no_compile: bool,
    verify_key: "VerifyKey | None",
    save_path: str | None,
) -> None:
    """Time every point and print the table."""
    from tune_model.package.load import start
    from tune_model.package.read import open_artifact
    from tune_model.pipeline.bench.interleave import interleave
    from tune_model.pipeline.bench.peers import release
    from tune_model.pipeline.bench.points import contenders_at, points_of
    from tune_model.pipeline.bench.result import check_result
    from tune_model.pipeline.console import console

    artifact = open_artifact(artifact_path, verify_key=verify_key)
    phases = artifact.manifest.request.phases
    points = [p for p in points_of(phases) if not only or any(begins_with(p, words) for words in only)]
    if not points:
        names = "; ".join(str(p) for p in points_of(phases))
        raise click.UsageError(f"--only matches no point; there are: {names}")
    if save_path is not None:
        check_result(Path(save_path))
    out = console()
    device = _device(artifact, device_name)
    if device.type == "cuda" and device.index is not None:
        import torch

        torch.cuda.set_device(device)  # graphs and events of the peers belong to the current one
    original = _original(artifact, weights_path, device)
    tuned = start(artifact, original, device)
    arguments = click.get_current_context().obj
    rows: list[dict[str, Any]] = []
    for point in points:
        contenders = contenders_at(
            point,
            tuned,
            original,
            compile_too=not no_compile,
            left_out=lambda name, why, at=point: out.print(f"{at}: {name} is left out: {why}", markup=False),  # type: ignore[misc]
        )
        timings = interleave(contenders, tuned.device, rounds=rounds)
        out.print(_table(point, timings))
        rows += [_row(point, timing) for timing in timings]
        if save_path is not None:
            _save(Path(save_path), artifact.manifest.name, tuned.device, rows, arguments)
        del contenders
        release(tuned.device)


def begins_with(point: "Point", words: str) -> bool:
    """Say whether a point's name begins with these whole words: `decode batch=1` is not `decode batch=16`."""
    return f"{point} ".startswith(f"{words.rstrip()} ")


def _device(artifact: "Artifact", name: str | None) -> "torch.device":
    """Return where to run, once it is clear that the artifact can: the original model may take minutes to build."""
    from tune_model.package.fingerprints import CudaToRun
    from tune_model.package.load import check_machine
    from tune_model.package.system import choose_device

    device = choose_device(name, "cuda" if isinstance(artifact.manifest.must_match_to_run, CudaToRun) else "cpu")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # loading it warns
        check_machine(artifact, device)
    return device


def _original(artifact: "Artifact", weights_path: str | None, device: "torch.device") -> "nn.Module":
    """Build the model that the artifact was made from, with the weights given, else its own, else random ones."""
    from tune_model.extract.tracing.front_end import SourceError
    from tune_model.package.verification.original import OriginalError, build_original, weights_at_hand
    from tune_model.pipeline.stored import stored_request
    from tune_model.runtime.errors import TuneModelError

    request = stored_request(artifact, Path.cwd())
    try:
        weights = weights_at_hand(artifact, request) if weights_path is None else Path(weights_path)
        return build_original(request, weights, device)
    except (OriginalError, SourceError) as error:
        raise TuneModelError(f"{artifact.path}: there is no original model to compare with: {error}") from error


def _table(point: "Point", timings: "tuple[Timing, ...]") -> Any:
    from rich.table import Table

    table = Table(title=str(point), title_justify="left")
    for name in ("", "device time", "20 to 80 %", "wall time", "against tuned", "95 % interval"):
        table.add_column(name, justify="right" if name else "left")
    for timing in timings:
        table.add_row(
            timing.name,
            f"{timing.median_ms:.3f} ms",
            f"{timing.low_ms:.3f} to {timing.high_ms:.3f}",
            f"{timing.wall_ms:.3f} ms",
            f"{timing.ratio:.2f}x",
            f"{timing.ratio_low:.2f} to {timing.ratio_high:.2f}",
        )
    return table


def _row(point: "Point", timing: "Timing") -> dict[str, Any]:
    import msgspec

    return {"point": str(point), "phase": point.phase, **point.sizes, **msgspec.structs.asdict(timing)}


def _save(
    path: Path, name: str, device: "torch.device", rows: list[dict[str, Any]], arguments: tuple[str, ...]
) -> None:
    from tune_model.pipeline.bench.result import (
        BenchmarkResult,
        command_text,
        device_name,
        library_versions,
        merge_commands,
        merge_rows,
        read_result,
        today,
        write_result,
    )

    command = command_text(arguments)
    merged = rows
    if path.is_file():
        old = read_result(path)
        merged = merge_rows(old.rows, rows, ("point", "name"))
        command = merge_commands(old.command, command) if len(merged) > len(rows) else command
    result = BenchmarkResult(name, device_name(device), library_versions(), today(), command, merged, _summary(merged))
    write_result(path, result)


def _summary(rows: list[dict[str, Any]]) -> dict[str, float]:
    """Flatten medians: `decode_b1_ms`, `decode_b1_ms_max_autotune`, `prefill_2048_ms`, `forward_b8_s128_ms`."""
    summary = {}
    for row in rows:
        match row["phase"]:
            case "decode":
                key = f"decode_b{row['batch']}_ms"
            case "prefill":
                key = f"prefill_{row['sequence']}_ms"
            case _:
                key = "_".join(
                    ["forward", *(f"{part[0]}{part.split('=')[1]}" for part in row["point"].split()[1:]), "ms"]
                )
        summary[key if row["name"] == "tuned" else f"{key}_{row['name']}"] = round(row["median_ms"], 4)
    return dict(sorted(summary.items()))
