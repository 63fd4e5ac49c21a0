"""What a configuration must mean: rules over several fields that types alone cannot say.

Each rule yields faults; nothing here touches files, devices or models.
"""

import math
from collections.abc import Iterator
from typing import Any, Final

from tune_model.pipeline.config.document import Path
from tune_model.pipeline.config.schema import Config, ForwardPhase, TorchModel, TransformersModel
from tune_model.pipeline.config.wording import Violation, list_words

__all__ = ["budget_seconds", "forward_grid", "violations"]

POINTS_AT_MOST: Final = 1024
SECONDS: Final = {"s": 1.0, "m": 60.0, "h": 3600.0}


def violations(config: Config) -> Iterator[Violation]:
    """Yield every fault of a configuration whose types are right, the most basic first."""
    yield from _model(config)
    yield from _phases(config)
    yield from _grids(config)
    yield from _inputs(config)
    yield from _limits(config)
    budget = budget_seconds(config)
    if budget is not None and not 0 < budget < math.inf:
        yield Violation(("search", "budget"), "a duration above zero, or null")


def budget_seconds(config: Config) -> float | None:
    """Return the search budget in seconds; `None` is no limit."""
    text = config.search.budget
    return None if text is None else float(text[:-1]) * SECONDS[text[-1]]


def forward_grid(phase: ForwardPhase) -> dict[str, tuple[int, ...]]:
    """Return the values of every size that a forward phase names, batch and sequence first."""
    named = {"batch": phase.batch, "sequence": phase.sequence}
    return {name: values for name, values in named.items() if values is not None} | phase.grid


def _model(config: Config) -> Iterator[Violation]:
    model = config.model
    if not isinstance(model, TransformersModel):
        if config.task != "forward":
            yield Violation(("task",), "forward, the only task of a model that is not from transformers")
        return
    given = [name for name in ("path", "hub", "config") if getattr(model, name) is not None]
    if len(given) != 1:
        seen = f"has {list_words(given, 'and')}" if given else "names no model"
        yield Violation(("model",), "exactly one of path, hub and config", seen)
    if model.revision is not None and model.hub is None:
        yield Violation(("model", "revision"), "no revision unless hub is given")
    if model.config is not None:
        if not isinstance(model.config.get("model_type"), str):
            yield Violation(("model", "config", "model_type"), "the model's type, such as llama or bert")
        yield from _finite(model.config, ("model", "config"))


def _finite(value: Any, path: Path) -> Iterator[Violation]:
    """Refuse NaN and infinity, which the artifact's JSON cannot hold."""
    if isinstance(value, float) and not math.isfinite(value):
        yield Violation(path, "a finite number", f"is {value}")
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for step, inner in items:
        yield from _finite(inner, (*path, step))


def _phases(config: Config) -> Iterator[Violation]:
    """Check that the phases and cache sizes given are those of the task."""
    workload = config.workload
    cached = config.task == "causal-lm"
    foreign = ("forward",) if cached else ("prefill", "decode", "max_length", "max_batch")
    for name in foreign:
        if getattr(workload, name) is not None:
            yield Violation(("workload", name), f"no {name} for the task {config.task}", "is given")
    if cached:
        if workload.prefill is None and workload.decode is None:
            yield Violation(("workload",), "prefill, decode or both", "has no phase")
        if workload.max_length is None:
            yield Violation(("workload", "max_length"), "the number of cache slots per row")
    elif workload.forward is None:
        yield Violation(("workload", "forward"), "a mapping with the values of each size, such as batch: [1, 8]")
    elif config.task == "encoder":
        for name in ("batch", "sequence"):
            if getattr(workload.forward, name) is None:
                yield Violation(("workload", "forward", name), "a non-empty list of positive integers")
        for name in workload.forward.grid:
            yield Violation(
                ("workload", "forward", "grid", name), "batch and sequence only, for an encoder", "is given"
            )


def _grids(config: Config) -> Iterator[Violation]:
    for phase, grid in _phase_grids(config):
        for path, values in grid.items():
            for index, value in enumerate(values):
                if value in values[:index]:
                    yield Violation((*path, index), "each value once", f"is {value} again")
        points = math.prod(len(values) for values in grid.values())
        if points > POINTS_AT_MOST:
            yield Violation(phase, f"at most {POINTS_AT_MOST}", f"has {points} combinations of values")
        weight = getattr(config.workload, str(phase[-1])).weight
        if not math.isfinite(weight):
            yield Violation((*phase, "weight"), "a positive, finite number", f"is {weight}")


def _phase_grids(config: Config) -> Iterator[tuple[Path, dict[Path, tuple[int, ...]]]]:
    """Yield each phase's path, and its lists of values by their paths."""
    workload = config.workload
    if workload.prefill is not None:
        path: Path = ("workload", "prefill")
        yield path, {(*path, "batch"): workload.prefill.batch, (*path, "sequence"): workload.prefill.sequence}
    if workload.decode is not None:
        path = ("workload", "decode")
        yield path, {(*path, "batch"): workload.decode.batch, (*path, "context"): workload.decode.context}
    if workload.forward is not None:
        path = ("workload", "forward")
        phase = workload.forward
        yield path, {_size_path(phase, name): values for name, values in forward_grid(phase).items()}


def _size_path(phase: ForwardPhase, name: str) -> Path:
    """Return where a forward phase gives the values of a size."""
    return ("workload", "forward", "grid", name) if name in phase.grid else ("workload", "forward", name)


def _inputs(config: Config) -> Iterator[Violation]:
    """Check that a forward task's inputs and its grid name the same sizes."""
    inputs = config.model.inputs
    if config.task != "forward":
        if inputs:
            yield Violation(
                ("model", "inputs"), f"no inputs for the task {config.task}, which knows its own", "is given"
            )
        return
    if not inputs:
        if isinstance(config.model, TorchModel):
            yield Violation(("model", "inputs"), "a list of the model's inputs, each with name and shape")
        return  # extract derives those of known kinds of models, and reads a saved program's
    names = [item.name for item in inputs]
    phase = config.workload.forward or ForwardPhase()
    known = forward_grid(phase)
    for index, item in enumerate(inputs):
        if item.name in names[:index]:
            yield Violation(("model", "inputs", index, "name"), "a name that no other input has")
        for place, size in enumerate(item.shape):
            if isinstance(size, str) and size not in known:
                wanted = list_words([*known, "an integer"])
                yield Violation(("model", "inputs", index, "shape", place), f"a size of $.workload.forward: {wanted}")
    used = {size for item in inputs for size in item.shape}
    for name in sorted({"batch", "sequence"} & phase.grid.keys()):
        yield Violation(_size_path(phase, name), f"$.workload.forward.{name} instead", "is given")
    for name in known:
        if name not in used:
            yield Violation(_size_path(phase, name), "a size that some input's shape names", "is not used")


def _limits(config: Config) -> Iterator[Violation]:
    """Check every value against the cache's size and the positions the model has."""
    workload = config.workload
    positions = None
    if isinstance(config.model, TransformersModel) and config.model.config is not None:
        stated = config.model.config.get("max_position_embeddings")
        positions = stated if isinstance(stated, int) else None
    slots = workload.max_length
    if positions is not None and slots is not None and slots > positions:
        yield Violation(("workload", "max_length"), f"at most the model's max_position_embeddings, {positions}")
    limits = {
        ("prefill", "sequence"): (slots, "max_length"),
        ("decode", "context"): (None if slots is None else slots - 1, "max_length less the new token"),
        ("prefill", "batch"): (workload.max_batch, "max_batch"),
        ("decode", "batch"): (workload.max_batch, "max_batch"),
        ("forward", "sequence"): (
            positions if config.task == "encoder" else None,
            "the model's max_position_embeddings",
        ),
    }
    for (name, field), (limit, meaning) in limits.items():
        for index, value in enumerate(getattr(getattr(workload, name), field, None) or ()):
            if limit is not None and value > limit:
                yield Violation(("workload", name, field, index), f"at most {limit} ({meaning})")
