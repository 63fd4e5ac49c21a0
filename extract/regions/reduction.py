"""Reduction regions: reductions over rows, with the pointwise work before and after them on the same rows.

A sum before a norm whose value is needed later too (a residual stream) becomes a second result. Reductions of the same
rows are made together.
"""

from collections.abc import Collection

from tune_model.extract.cost import element_bytes
from tune_model.extract.regions.partition import Formed, Partition
from tune_model.extract.regions.vocabulary import CHEAP, OpClass
from tune_model.extract.rewrite.graph import READ_BY_CALLER, refs

__all__ = ["form_reductions"]

MAX_RESULTS = 2
MAX_BESIDE = 4
"""Results of reductions that share their rows: a row value each."""

MAX_STEPS = 48
MAX_TABLE_BYTES = 256 << 20
"""Of an embedding that joins a norm: what is saved is one launch, what a larger one costs is gigabytes to tune with."""

MAX_RANK = 3
"""Loops: the reduced one and at most two over rows (heads share a rotary angle, a batch shares positions)."""

_JOINS = frozenset({OpClass.POINTWISE, OpClass.REDUCE, OpClass.NORMALISE, OpClass.JOIN})
_SEEDS = frozenset({OpClass.REDUCE, OpClass.NORMALISE, OpClass.AS_WRITTEN})


def form_reductions(partition: Partition) -> None:
    """Form a region for every reduction, in program order: first backwards, then forwards."""
    for index, kind in enumerate(partition.classes):
        if kind in _SEEDS and partition.is_free(index):
            formed = partition.try_form("reduction", (index,))
            if formed is not None:
                formed = _beside(partition, formed, kind)
                formed = _forwards(partition, _backwards(partition, formed))
                # Once more: a norm that joined last has a weight that may be made of a weight (1 + w).
                partition.accept(_backwards(partition, formed))


def _beside(partition: Partition, formed: Formed, kind: OpClass) -> Formed:
    """Take in reductions of the same value: they read the same rows."""
    if kind is not OpClass.REDUCE:
        return formed
    (first,) = formed.members
    source = refs(partition.graph.steps[first])[0]
    for step in partition.readers(source):
        if step in {READ_BY_CALLER, first} or not partition.is_free(step):
            continue
        if partition.classes[step] is OpClass.REDUCE and refs(partition.graph.steps[step])[0] == source:
            grown = partition.try_form("reduction", {*formed.members, step})
            if grown is not None and len(grown.region.results) <= MAX_BESIDE:
                formed = grown
    return formed


def _backwards(partition: Partition, formed: Formed) -> Formed:
    """Take in the pointwise steps that make what the region reads."""
    tried: set[int] = set()
    most = max(MAX_RESULTS, len(formed.region.results))
    while len(formed.members) < MAX_STEPS:
        step = _producer(partition, formed.members, tried)
        if step is None:
            break
        tried.add(step)
        grown = partition.try_form("reduction", {*formed.members, step})
        if grown is None or len(grown.region.results) > most or not _keeps_rows(formed, grown):
            continue
        if _is_on_rows(partition, grown, step) and _crossings(grown) <= _crossings(formed):
            formed = grown
    return formed


def _is_on_rows(partition: Partition, grown: Formed, step: int) -> bool:
    """Say whether a step in front computes each element once: it has as many as the rows together.

    Less (a rotary angle per token, a weight) would be computed again for every row; that is fine for what only this
    region needs and costs next to nothing, such as 1 + w, or a row of a table instead of a copy of it.
    """
    call = partition.graph.steps[step]
    name = call.results[0] or ""
    rows = next(i for i in grown.members if partition.classes[i] in _SEEDS)
    if partition.elements(name) == partition.elements(refs(partition.graph.steps[rows])[0]):
        return True
    return (call.op in CHEAP or partition.classes[step] is OpClass.LOOKUP) and name not in grown.region.results


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
        and (partition.classes[m] is OpClass.POINTWISE or _is_small_lookup(partition, m))
    ]
    return max(fitting, default=None)


def _is_small_lookup(partition: Partition, step: int) -> bool:
    """Say whether a step looks rows up in a table that a tuner can afford to hold in float64 beside itself."""
    if partition.classes[step] is not OpClass.LOOKUP:
        return False
    table = refs(partition.graph.steps[step])[0]
    elements = partition.elements(table).constant
    return elements is not None and elements * element_bytes(partition.graph.type(table).dtype) <= MAX_TABLE_BYTES


def _forwards(partition: Partition, formed: Formed) -> Formed:
    """Take in what reads the region's values, as long as nothing else does."""
    members = set(formed.members)
    refused: set[int] = set()
    since = 0
    while len(members) < MAX_STEPS and since < 8:
        step = _reader(partition, members, refused)
        if step is None:
            break
        since += 1
        if len(partition.results({*members, step})) > len(formed.region.results):
            members.add(step)
            continue
        grown = partition.try_form("reduction", {*members, step})
        if grown is None or not _keeps_rows(formed, grown):
            # Another reader may have to come first: of x - mean(x) times 1 / std(x) the difference.
            refused.add(step)
            continue
        formed, since = grown, 0
        members = set(formed.members)
        refused.clear()
    return formed


def _reader(partition: Partition, members: Collection[int], refused: Collection[int]) -> int | None:
    """Return the first step that reads only values of the region nobody but its like needs."""
    for result in reversed(partition.results(members)):
        readers = [r for r in partition.readers(result) if r not in members]
        if READ_BY_CALLER in readers:
            continue
        first = min(readers)
        if partition.is_free(first) and partition.classes[first] in _JOINS and first not in refused:
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
