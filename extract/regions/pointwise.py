"""Pointwise regions: what is left of pointwise chains, with the slices, joins and transposes inside them."""

from collections.abc import Collection

from tune_model.extract.regions.partition import Formed, Partition
from tune_model.extract.regions.vocabulary import CHEAP, OpClass
from tune_model.extract.rewrite.graph import READ_BY_CALLER, refs

__all__ = ["form_pointwise"]

MAX_RESULTS = 4
MAX_STEPS = 64
_MEMBERS = frozenset({OpClass.POINTWISE, OpClass.COPY, OpClass.JOIN})


def form_pointwise(partition: Partition) -> None:
    """Form regions of the free pointwise steps, in program order, each as large as it gets."""
    for index, kind in enumerate(partition.classes):
        if kind in _MEMBERS and partition.is_free(index):
            formed = partition.try_form("pointwise", (index,))
            if formed is not None:
                partition.accept(_grow(partition, formed))


def _grow(partition: Partition, formed: Formed) -> Formed:
    tried: set[int] = set()
    members = set(formed.members)
    while len(members) < MAX_STEPS:
        step = _neighbour(partition, members, tried)
        if step is None:
            break
        tried.add(step)
        grown = partition.try_form("pointwise", {*members, step})
        if grown is None or len(grown.region.results) > MAX_RESULTS:
            continue
        members, tried = set(grown.members), set()
        if _is_even(partition, grown):
            formed = grown
    return formed


def _is_even(partition: Partition, formed: Formed) -> bool:
    """Say whether all results have as many elements, so that one loop nest writes them; growth may pass over others."""
    return len({partition.elements(r) for r in formed.region.results}) == 1


def _neighbour(partition: Partition, members: Collection[int], tried: set[int]) -> int | None:
    """Return the first free pointwise step that reads the region, or makes what it reads, over as many elements."""
    found: set[int] = set()
    for index in members:
        step = partition.graph.steps[index]
        for name in refs(step):
            maker = partition.maker(name)
            if maker is not None and _same_work(partition, maker, index):
                found.add(maker)
        for result in step.results:
            for reader in partition.readers(result) if result is not None else ():
                if _same_work(partition, index, reader):
                    found.add(reader)
    fitting = [
        i
        for i in found
        if i not in members and i not in tried and partition.is_free(i) and partition.classes[i] in _MEMBERS
    ]
    return min(fitting, default=None)


def _same_work(partition: Partition, maker: int, reader: int) -> bool:
    """Say whether a step's values are read without being broadcast: joining must not compute anything twice.

    A slice or a join changes the number of elements too, but computes none of them twice. What only this reader needs
    and costs next to nothing (a cast, a sign, a sum) may be computed once per reader's element.
    """
    if reader == READ_BY_CALLER:
        return False
    if OpClass.JOIN in {partition.classes[maker], partition.classes[reader]}:
        return True
    steps = partition.graph.steps
    if None in {*steps[maker].results[:1], *steps[reader].results[:1]} or not steps[reader].results:
        return False
    made = partition.elements(steps[maker].results[0] or "")
    asked = partition.elements(steps[reader].results[0] or "")
    if made.over(asked) is not None:
        return True
    return steps[maker].op in CHEAP and partition.readers(steps[maker].results[0] or "") == [reader]
