"""Reduction regions: reductions over rows, with the pointwise work before and after them on the same rows.

A sum before a norm whose value is needed later too (a residual stream) becomes a second result.
"""

from collections.abc import Collection

from tune_model.extract.regions.partition import Formed, Partition
from tune_model.extract.regions.vocabulary import CHEAP, OpClass
from tune_model.extract.rewrite.graph import READ_BY_CALLER, refs

__all__ = ["form_reductions"]

MAX_RESULTS = 2
MAX_STEPS = 48
MAX_RANK = 3
"""Loops: the reduced one and at most two over rows (heads share a rotary angle, a batch shares positions)."""

_JOINS = frozenset({OpClass.POINTWISE, OpClass.REDUCE, OpClass.NORMALISE, OpClass.JOIN})


def form_reductions(partition: Partition) -> None:
    """Form a region for every reduction, in program order: first backwards, then forwards."""
    for index, kind in enumerate(partition.classes):
        if kind in {OpClass.REDUCE, OpClass.NORMALISE} and partition.is_free(index):
            formed = partition.try_form("reduction", (index,))
            if formed is not None:
                formed = _forwards(partition, _backwards(partition, formed))
                # Once more: a norm that joined last has a weight that may be made of a weight (1 + w).
                partition.accept(_backwards(partition, formed))


def _backwards(partition: Partition, formed: Formed) -> Formed:
    """Take in the pointwise steps that make what the region reads."""
    tried: set[int] = set()
    while len(formed.members) < MAX_STEPS:
        step = _producer(partition, formed.members, tried)
        if step is None:
            break
        tried.add(step)
        grown = partition.try_form("reduction", {*formed.members, step})
        if grown is None or len(grown.region.results) > MAX_RESULTS or not _keeps_rows(formed, grown):
            continue
        if _is_on_rows(partition, grown, step) and _crossings(grown) <= _crossings(formed):
            formed = grown
    return formed


def _is_on_rows(partition: Partition, grown: Formed, step: int) -> bool:
    """Say whether a step in front computes each element once: it has as many as the rows together.

    Less (a rotary angle per token, a weight) would be computed again for every row; that is fine for what only this
    region needs and costs next to nothing, such as 1 + w.
    """
    call = partition.graph.steps[step]
    name = call.results[0] or ""
    rows = next(i for i in grown.members if partition.classes[i] in {OpClass.REDUCE, OpClass.NORMALISE})
    if partition.elements(name) == partition.elements(refs(partition.graph.steps[rows])[0]):
        return True
    return call.op in CHEAP and name not in grown.region.results


def _producer(partition: Partition, members: Collection[int], tried: set[int]) -> int | None:
    """Return the last free pointwise step among those that make the region's operands."""
    makers = {partition.maker(n) for i in members for n in refs(partition.graph.steps[i])}
    fitting = [
        m
        for m in makers
        if m is not None
        and m not in members
        and m not in tried
        and partition.is_free(m)
        and partition.classes[m] is OpClass.POINTWISE
    ]
    return max(fitting, default=None)


def _forwards(partition: Partition, formed: Formed) -> Formed:
    """Take in what reads the region's last value, as long as nothing else does."""
    members = set(formed.members)
    since = 0
    while len(members) < MAX_STEPS and since < 8:
        step = _reader(partition, members)
        if step is None:
            break
        members.add(step)
        since += 1
        if len(partition.results(members)) > len(formed.region.results):
            continue
        grown = partition.try_form("reduction", members)
        if grown is None or not _keeps_rows(formed, grown):
            break
        formed, since = grown, 0
    return formed


def _reader(partition: Partition, members: Collection[int]) -> int | None:
    """Return the first step that reads only values of the region nobody but its like needs."""
    for result in reversed(partition.results(members)):
        readers = [r for r in partition.readers(result) if r not in members]
        if READ_BY_CALLER in readers:
            continue
        first = min(readers)
        if partition.is_free(first) and partition.classes[first] in _JOINS:
            return first
    return None


def _crossings(formed: Formed) -> int:
    """Count operands whose rows do not lie along memory: a transpose is better made by a pointwise region."""
    types = [p.type for p in formed.canonical.form.parameters]
    return sum(t.strides is not None and t.shape[-1] != 1 and t.strides[-1] not in {0, 1} for t in types)


def _keeps_rows(before: Formed, after: Formed) -> bool:
    """Say whether rows are still simple: as many loops as before, or few."""
    return _rank(after) <= max(_rank(before), MAX_RANK)


def _rank(formed: Formed) -> int:
    form = formed.canonical.form
    return max(len(p.type.shape) for p in (*form.parameters, *form.results))
