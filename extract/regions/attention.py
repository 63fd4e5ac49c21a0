"""Attention regions: the attention of one layer, with the append of its new keys and values to the cache.

What makes the queries and the new keys of one token (a rotary embedding, a norm of each head) is little work on few
numbers, and a kernel of its own costs a launch. It may be taken in as well: the other grouping of the same steps.
"""

from collections.abc import Collection

from tune_model.extract.regions.partition import Formed, Partition
from tune_model.extract.regions.vocabulary import OpClass
from tune_model.extract.rewrite.graph import refs

__all__ = ["form_attention"]

MAX_STEPS = 24
_APPEND = "tune_model.append_kv"
_OVER_CACHE = "tune_model.cached_attention"
_ATTENTION = frozenset({"aten.scaled_dot_product_attention.default", _OVER_CACHE, "tune_model.causal_attention"})
_ON_HEADS = frozenset({OpClass.POINTWISE, OpClass.JOIN, OpClass.NORMALISE})


def form_attention(partition: Partition, *, with_heads: bool = False) -> None:
    """Form a region for every attention.

    Append and attention of one layer are one region, since a kernel can write the new keys and values while it reads
    them. An append that cannot join (its attention is elsewhere) stays a call.

    Args:
        partition: Of a program.
        with_heads: Where there is one token per row, take in what makes its queries and keys.
    """
    steps = partition.graph.steps
    append: int | None = None
    for index, step in enumerate(steps):
        if step.op == _APPEND:
            append = index
        elif step.op in _ATTENTION:
            formed = None
            if append is not None and _belongs(partition, append, index):
                formed = partition.try_form("attention", (append, index))
                if with_heads and formed is not None and _has_one_token(partition, index):
                    formed = _with_heads(partition, formed, (append, index))
            formed = formed or partition.try_form("attention", (index,))
            if formed is not None:
                partition.accept(formed)
            append = None


def _belongs(partition: Partition, append: int, attention: int) -> bool:
    """Say whether an attention reads the cache just written, or the keys and values just appended."""
    steps = partition.graph.steps
    written = [partition.root(n) for n in list(refs(steps[append]))[:4]]
    k, v = (partition.root(n) for n in list(refs(steps[attention]))[1:3])
    return [k, v] in (written[:2], written[2:])


def _has_one_token(partition: Partition, attention: int) -> bool:
    step = partition.graph.steps[attention]
    return step.op == _OVER_CACHE and partition.graph.type(refs(step)[0]).shape[2] == 1


def _with_heads(partition: Partition, formed: Formed, core: tuple[int, int]) -> Formed:
    """Take in the steps that make the queries and the new keys, as long as nothing else reads what they make."""
    append, attention = core
    steps = partition.graph.steps
    wanted = [refs(steps[attention])[0], refs(steps[append])[2]]
    members = set(formed.members)
    pending = list(wanted)
    while pending and len(members) < MAX_STEPS:
        maker = partition.maker(pending.pop())
        if maker is None or maker in members or not _is_on_heads(partition, maker):
            continue
        members.add(maker)
        pending += refs(steps[maker])
    grown = partition.try_form("attention", _closed(partition, members, core))
    return formed if grown is None or len(grown.region.results) > 1 else grown


def _is_on_heads(partition: Partition, step: int) -> bool:
    return partition.is_free(step) and partition.classes[step] in _ON_HEADS


def _closed(partition: Partition, members: Collection[int], core: tuple[int, int]) -> set[int]:
    """Return the members whose results only members read; what others need too (angles) is made once, outside."""
    kept = set(members)
    while True:
        shared = {
            i
            for i in kept.difference(core)
            for result in partition.graph.steps[i].results
            if result is not None and not kept.issuperset(partition.readers(result))
        }
        if not shared:
            return kept
        kept -= shared
