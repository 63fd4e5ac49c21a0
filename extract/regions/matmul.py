"""Matmul regions: a matrix multiplication and the pointwise work on its output tile.

The epilogue grows along the output while nothing else reads what lies between: bias, activation, the product of the two
halves of a merged gate and up projection, a residual, scales, casts, clamps. What else it reads must be full, a row, a
column or a number, so that one tile of the output needs one tile of it.

A residual sum may also be left to the norm that reads it: the other grouping of the same steps, which competes where a
search takes its time.
"""

from tune_model.extract.algebra import polynomial
from tune_model.extract.cost import element_bytes
from tune_model.extract.regions.partition import Formed, Partition
from tune_model.extract.regions.region import Region
from tune_model.extract.regions.vocabulary import OpClass, classify
from tune_model.extract.rewrite.graph import READ_BY_CALLER, refs
from tune_model.runtime.program import Call, Ref

__all__ = ["form_matmuls"]

MAX_EPILOGUE = 24
_ROWS = frozenset({OpClass.REDUCE, OpClass.NORMALISE, OpClass.AS_WRITTEN})

LOOK_AHEAD = 8
"""How many steps past the last closed region growth goes on: both halves of a gate must join before it closes again."""


def form_matmuls(partition: Partition, *, leave_sums: bool = False) -> None:
    """Form a region for every matmul, in program order.

    Args:
        partition: Of a program.
        leave_sums: Leave residual sums to the norms that read them.
    """
    for index, kind in enumerate(partition.classes):
        if kind is OpClass.MATMUL and partition.is_free(index):
            formed = _grow(partition, index, leave_sums=leave_sums)
            if formed is not None:
                partition.accept(formed)


def _grow(partition: Partition, index: int, *, leave_sums: bool) -> Formed | None:
    members = [index]
    best = partition.try_form("matmul", members)
    if best is None:
        return None
    since = 0
    while len(members) <= MAX_EPILOGUE and since < LOOK_AHEAD:
        step = _next(partition, members)
        if step is None or (leave_sums and _is_sum_before_norm(partition, step)):
            break
        members.append(step)
        since += 1
        if len(partition.results(members)) != 1:
            continue
        formed = partition.try_form("matmul", members)
        if formed is None or not _is_epilogue(partition, formed.region):
            break
        if not _widens(partition, formed.region):
            best, since = formed, 0
    return best


def _next(partition: Partition, members: list[int]) -> int | None:
    """Return the first pointwise step that reads the region and belongs to none; `None` when growth is over."""
    readers: set[int] = set()
    for result in partition.results(members):
        readers.update(r for r in partition.readers(result) if r not in members)
    if not readers or READ_BY_CALLER in readers:
        return None
    first = min(readers)
    fits = partition.classes[first] is OpClass.POINTWISE and partition.is_free(first)
    return first if fits else None


def _is_sum_before_norm(partition: Partition, step: int) -> bool:
    """Say whether a step adds two tensors of one size, and a reduction over rows reads the sum."""
    call = partition.graph.steps[step]
    result = call.results[0] or ""
    if call.op != "aten.add.Tensor" or [partition.elements(n) for n in refs(call)] != [partition.elements(result)] * 2:
        return False
    return any(i != READ_BY_CALLER and partition.classes[i] in _ROWS for i in partition.readers(result))


def _is_epilogue(partition: Partition, region: Region) -> bool:
    """Say whether every slice in the region is one half of the matmul's columns."""
    sizes = {o.name: o.type.shape for o in region.operands}
    sizes.update({r: partition.graph.type(r).shape for c in region.calls for r in c.results if r is not None})
    for call in region.calls:
        if call.op != "aten.slice.Tensor":
            continue
        source, dim = call.args[0], call.args[1]
        if not isinstance(source, Ref) or not isinstance(dim, int):
            return False
        whole = polynomial(sizes[source.name][dim])
        part = polynomial(sizes[call.results[0] or ""][dim])
        if part + part != whole:
            return False
    return _has_simple_rows(partition, region)


def _widens(partition: Partition, region: Region) -> bool:
    """Say whether the region ends in a larger element type than its matmul's, for a reader that can cast itself."""
    (result,) = region.results
    if READ_BY_CALLER in partition.readers(result):
        return False
    product = next(c.results[0] for c in region.calls if classify(c) is OpClass.MATMUL)
    sizes = [element_bytes(partition.graph.type(n).dtype) for n in (result, product or result)]
    return sizes[0] > sizes[1]


def _has_simple_rows(partition: Partition, region: Region) -> bool:
    """Say whether the epilogue added no loop: a linear keeps one row loop if it had one."""
    alone = region._replace(
        calls=tuple(c for c in region.calls if classify(c) is OpClass.MATMUL),
        operands=tuple(o for o in region.operands if "@" in o.name),
    )
    alone = alone._replace(results=tuple(r for r in _made(alone.calls)))
    before = partition.canonical(alone).form.results[0].type.shape
    after = partition.canonical(region).form.results[0].type.shape
    return len(before) == len(after)


def _made(calls: tuple[Call, ...]) -> list[str]:
    return [r for c in calls for r in c.results if r is not None]
