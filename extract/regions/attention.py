"""Attention regions: the attention of one layer, with the append of its new keys and values to the cache."""

from tune_model.extract.regions.partition import Partition
from tune_model.extract.rewrite.graph import refs

__all__ = ["form_attention"]

_APPEND = "tune_model.append_kv"
_ATTENTION = frozenset(
    {"aten.scaled_dot_product_attention.default", "tune_model.cached_attention", "tune_model.causal_attention"}
)


def form_attention(partition: Partition) -> None:
    """Form a region for every attention.

    Append and attention of one layer are one region, since a kernel can write the new keys and values while it reads
    them. An append that cannot join (its attention is elsewhere) stays a call.
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
