"""Encoder models at every point of their grids, beside `torch.compile` at its best and eager."""

from typing import Any, NamedTuple

from bench.run import Bench, attempt

from deployment.artifacts import Deployment, deploy, tuned_artifact
from deployment.decoding import device_of
from deployment.models import Model, encoders
from deployment.timings import meet
from tune_model.extract.request import Phase
from tune_model.pipeline.bench.interleave import Contender
from tune_model.pipeline.bench.peers import peers, release
from tune_model.pipeline.bench.points import Point, calls_at, points_of

__all__ = ["run_encoders"]


class _Row(NamedTuple):
    name: str
    model: Model
    point: Point


def run_encoders(bench: Bench, *, small: bool) -> None:
    """Measure every point of every encoder."""
    device = device_of(bench)
    for model in encoders(device.type, small=small):
        if bench.clock.is_over:
            return
        rows = bench.missing("encoders", [_Row(_name(model, p), model, p) for p in _points(model)])
        if not rows:
            continue
        path = tuned_artifact(bench, model)
        here = deploy(path, device)
        for row in rows:
            if bench.clock.is_over:
                return
            made = attempt(bench, "encoders", row.name, lambda row=row, here=here: _measure(bench, here, row))
            if made is not None:
                bench.tell(f"  {row.name}: {made['tuned_ms']:.3f} ms")
            release(device)


def _points(model: Model) -> list[Point]:
    grid = {name: tuple(values) for name, values in model.config["workload"]["forward"].items()}
    return list(points_of((Phase("forward", grid),)))


def _name(model: Model, point: Point) -> str:
    sizes = " ".join(f"{name}={value}" for name, value in point.sizes.items())
    return f"{model.name} {sizes}"


def _measure(bench: Bench, here: Deployment, row: _Row) -> dict[str, Any]:
    device = here.tuned.device
    ours, theirs = calls_at(row.point, here.tuned, here.original)
    made = meet(
        bench, row.name, Contender("tuned", ours), peers(theirs, device, compile_too=True, as_called=False), device
    )
    tokens = row.point.sizes.get("batch", 1) * row.point.sizes.get("sequence", 197)
    return {"model": row.model.name, **row.point.sizes, "tokens": tokens, **made}
