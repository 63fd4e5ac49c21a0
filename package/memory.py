"""What an artifact will occupy on its device when it is served: weights, cache, workspace, graphs.

Needs no torch and no device. Not in it: temporaries inside a step that runs as several operators, and what torch and
the driver take for themselves (a CUDA context, libraries' workspaces, the nodes of graphs).
"""

from collections.abc import Iterable, Mapping
from itertools import product

import msgspec

from tune_model.package.format.tensors import element_bytes
from tune_model.runtime.expression import evaluate
from tune_model.runtime.generation.buckets import buckets_of
from tune_model.runtime.program import Apply, Call, Program, Ref, TensorType, bind_form
from tune_model.runtime.replay import Replay, slot_sizes

__all__ = ["MemoryPlan", "activation_bytes", "plan_memory", "type_bytes"]

Grids = Mapping[str, Mapping[str, tuple[int, ...]]]

_STATE_BYTES = 4 * 8 + 3 * 4
"""Of a row, besides its random numbers: token, position, whether it moves, top k; temperature, top p, penalty."""


class MemoryPlan(msgspec.Struct, frozen=True):
    """Bytes on the device.

    Attributes:
        weights: Once, whatever number of programs and sizes read them.
        rows: Of the cache; 0 for a model without one.
        slots: Of each row.
        cache: Keys and values of all rows, and the rows' state.
        workspace: Activations alive between two steps and kernels' scratch, at the largest tuned point of any program.
            Graphs share one pool, so it is needed once.
        graphs: Decode steps that are captured for one kind of sampling; 0 on a CPU.
        graph_outputs: Logits that those graphs keep.
    """

    weights: int
    rows: int
    slots: int
    cache: int
    workspace: int
    graphs: int
    graph_outputs: int

    @property
    def total(self) -> int:
        """All of it."""
        return self.weights + self.cache + self.workspace + self.graph_outputs


def plan_memory(
    programs: Mapping[str, Program], replay: Replay, grids: Grids, *, rows: int, weight_bytes: int, graphs: bool
) -> MemoryPlan:
    """Plan for serving as many rows as the model was traced for.

    Args:
        programs: By phase.
        replay: Which kernels run.
        grids: What was tuned, by phase.
        rows: Of the cache.
        weight_bytes: Of all weights, after their transforms.
        graphs: Steps are captured: a CUDA device.
    """
    workspace = max(
        (
            activation_bytes(program, point) + _scratch_bytes(program, replay, point)
            for name, program in programs.items()
            for point in _points(program, grids.get(name, {}))
        ),
        default=0,
    )
    decode, prefill = programs.get("decode"), programs.get("prefill")
    if decode is None or prefill is None:
        return MemoryPlan(weight_bytes, 0, 0, 0, workspace, 0, 0)
    caches = [item.type for item in decode.inputs if item.role == "cache"]
    slots = int(caches[0].shape[2]) if caches else 0
    sizes = {s.name: rows if s.name == "batch" else s.minimum for s in decode.symbols}
    cache = sum(type_bytes(type_, sizes) for type_ in caches) + rows * (_STATE_BYTES + 4 * (slots + 1))
    count = outputs = 0
    if graphs:
        buckets = buckets_of(prefill, grids, rows=rows, slots=slots, exact=False, chunked=True)
        contexts = max(len(buckets.contexts), 1)
        count = len(buckets.batches_all()) * contexts
        logits = decode.values[decode.outputs[0].value]
        outputs = contexts * sum(type_bytes(logits, {**sizes, "batch": b}) for b in buckets.batches_all())
    return MemoryPlan(weight_bytes, rows, slots, cache, workspace, count, outputs)


def type_bytes(type_: TensorType, symbols: Mapping[str, int]) -> int:
    """Return the size of a tensor without gaps."""
    size = element_bytes(type_.dtype)
    for dim in type_.shape:
        size *= evaluate(dim, symbols)
    return size


def activation_bytes(program: Program, point: Mapping[str, int]) -> int:
    """Return the most that is alive between two steps of a program when nothing shares memory."""
    last: dict[str, int] = {}
    for index, step in enumerate(program.steps):
        for name in _reads(step):
            last[name] = index
    kept = {output.value for output in program.outputs}
    alive = peak = 0
    for index, step in enumerate(program.steps):
        made = step.outputs if isinstance(step, Apply) else tuple(r for r in step.results if r is not None)
        alive += sum(type_bytes(program.values[name], point) for name in made if name in program.values)
        peak = max(peak, alive)
        dead = {name for name in (*_reads(step), *made) if last.get(name, index) == index} - kept
        alive -= sum(type_bytes(program.values[name], point) for name in dead if name in program.values)
    return peak


def _scratch_bytes(program: Program, replay: Replay, point: Mapping[str, int]) -> int:
    """Return the most scratch memory that a winner takes at a point."""
    most = 0
    for step in program.steps:
        if not isinstance(step, Apply):
            continue
        dims = tuple(evaluate(dim, point) for dim in step.dims)
        for entry in replay.forms.get(step.form, ()):
            if entry.dims == dims and entry.kernel.workspaces:
                sizes = slot_sizes(bind_form(program.forms[step.form], dims))
                scratch = sum(element_bytes(w.dtype) * evaluate(w.size, sizes) for w in entry.kernel.workspaces)
                most = max(most, scratch)
    return most


def _points(program: Program, grid: Mapping[str, tuple[int, ...]]) -> Iterable[dict[str, int]]:
    values = [grid.get(s.name) or (s.minimum if s.default is None else s.default,) for s in program.symbols]
    for chosen in product(*values):
        yield dict(zip((s.name for s in program.symbols), chosen, strict=True))


def _reads(step: Apply | Call) -> Iterable[str]:
    if isinstance(step, Apply):
        yield from step.inputs
        return
    pending: list[object] = [step]
    while pending:
        value = pending.pop()
        if isinstance(value, Ref):
            yield value.name
        elif isinstance(value, msgspec.Struct):
            pending += [getattr(value, field) for field in value.__struct_fields__]
        elif isinstance(value, tuple):
            pending += value
