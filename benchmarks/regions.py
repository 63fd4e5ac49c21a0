"""Random regions: each compiled for Hopper, run in Triton's interpreter and as C++, and compared with ATen and float64.

    PYTHONPATH=src python benchmarks/regions.py                        300 regions, into benchmarks/results
    PYTHONPATH=src python benchmarks/regions.py --count 40 --save /tmp/regions.json

The regions are the tests' own (tests/support/random_forms.py), so a clone of the repository is needed. Nothing is
timed; the result says what was compared and how near the nearest miss was.
"""

import json
import os
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from region_trials import Trial

COMMAND = "PYTHONPATH=src python benchmarks/regions.py"
SUPPORT = str(Path(__file__).resolve().parent.parent / "tests" / "support")


@click.command()
@click.option("--count", default=300, show_default=True, help="How many regions.")
@click.option("--first", default=0, show_default=True, help="Seed of the first.")
@click.option("--save", "path", type=click.Path(path_type=Path), default=None, help="The result file.")
@click.option("--interpret", is_flag=True, hidden=True, help="Print what Triton's interpreter computes wrong.")
def main(count: int, first: int, path: Path | None, interpret: bool) -> None:
    """Compare random regions with ATen and write one result file."""
    sys.path.insert(0, SUPPORT)
    from region_trials import Trial, trial

    made = {seed: trial(seed) for seed in range(first, first + count)}
    regions = [one for one in made.values() if isinstance(one, Trial)]
    if interpret:
        for one in regions:
            print(json.dumps(_interpreted(one)), flush=True)
        return
    _save(path, list(made), regions)


def _save(path: Path | None, seeds: list[int], regions: "list[Trial]") -> None:
    import torch

    from tune_model.pipeline.bench.result import BenchmarkResult, device_name, library_versions, today, write_result

    rows = {one.seed: _described(one) for one in regions}
    for seed, found in _in_interpreter(seeds).items():
        rows[seed] |= found
    for seed, found in _as_cpp(regions).items():
        rows[seed] |= found
    for one in regions:
        rows[one.seed] |= _compiled(one)
    summary = _summary(len(seeds), list(rows.values()))
    place = path or Path(__file__).parent / "results" / "regions.cpu.json"
    device = device_name(torch.device("cpu"))
    write_result(
        place,
        BenchmarkResult("regions", device, library_versions(), today(), COMMAND, list(rows.values()), summary),
    )
    for key, value in summary.items():
        print(f"{key:28} {value}")


def _described(one: "Trial") -> dict[str, Any]:
    from region_trials import triton_choice

    from tune_model.tune.candidate import Candidate, label

    dtypes = sorted({p.type.dtype for p in one.form.parameters})
    return {
        "row": f"seed {one.seed}",
        "kind": one.form.kind,
        "dtypes": dtypes,
        "operators": [call.op.removeprefix("aten.") for call in one.form.body],
        "axes": [axis.size for axis in one.nest.axes],
        "columns": one.nest.inner,
        "interpreted": label(Candidate(*triton_choice(one))),
    }


def _compiled(one: "Trial") -> dict[str, Any]:
    """Compile one of the configurations that a tuner would try first for sm_90."""
    from devices import cuda_target
    from region_trials import compiled_choice

    from tune_model.extract.task import NumericRules, Task
    from tune_model.tune.building.built_file import build_candidate
    from tune_model.tune.candidate import Candidate, Rejected, label

    candidate = Candidate(*compiled_choice(one, cuda_target()))
    built = build_candidate(Task(one.form, NumericRules()), candidate, cuda_target())
    if isinstance(built, Rejected):
        return {"for_sm_90": label(candidate), "compiled": False, "refused": f"{built.reason}: {built.detail}"}
    return {"for_sm_90": label(candidate), "compiled": True, "registers": built.registers}


def _as_cpp(regions: "list[Trial]") -> dict[int, dict[str, Any]]:
    from cpp_kernels import Library

    from tune_model.tune.cpp.columns import Shape
    from tune_model.tune.machine.cpu import probe_cpu

    found: dict[int, dict[str, Any]] = {}
    for start in range(0, len(regions), 30):
        part = regions[start : start + 30]
        library = Library({str(one.seed): one.nest for one in part}, probe_cpu(), Shape(2, "costly", 64))
        for one in part:
            run = partial(library.run, str(one.seed), one.form, one.inputs())
            found[one.seed] = _judged(one, "cpp", run)
    return found


def _interpreted(one: "Trial") -> dict[str, Any]:
    from interpreted import interpret
    from region_trials import triton_plan

    run = partial(interpret, triton_plan(one), one.form, one.inputs())
    return {"seed": one.seed, **_judged(one, "interpreter", run)}


def _judged(one: "Trial", name: str, run: Any) -> dict[str, Any]:
    """Run and compare; the error is a share of what is allowed."""
    try:
        return {f"{name}_equal": True, f"{name}_error": float(f"{one.require(run()):.4g}")}
    except AssertionError as error:
        return {f"{name}_equal": False, f"{name}_says": str(error)[:200]}


def _in_interpreter(seeds: list[int]) -> dict[int, dict[str, Any]]:
    """Triton interprets in a process of its own: the mode is fixed when it is imported."""
    command = [sys.executable, __file__, "--interpret", "--first", str(seeds[0]), "--count", str(len(seeds))]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONWARNINGS": "ignore"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    return {line.pop("seed"): line for line in lines}


def _summary(count: int, rows: list[dict[str, Any]]) -> dict[str, float]:
    errors = [row[key] for row in rows for key in ("interpreter_error", "cpp_error") if key in row]
    return {
        "regions": count,
        "lowered": len(rows),
        "reductions": sum(row["columns"] > 0 for row in rows),
        "compiled": sum(row["compiled"] for row in rows),
        "interpreter_equal": sum(row["interpreter_equal"] for row in rows),
        "cpp_equal": sum(row["cpp_equal"] for row in rows),
        "worst_share_of_allowed": max(errors, default=0.0),
    }


if __name__ == "__main__":
    main()
