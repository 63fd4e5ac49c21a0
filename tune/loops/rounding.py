"""Choosing precision: keep every rounding that the ATen sequence makes, or compute through in float32."""

from tune_model.tune.loops.graph import prune, renumber
from tune_model.tune.loops.ir import Cast, LoopNest, Node, Store

__all__ = ["elide_rounding"]

_WIDE = frozenset({"float32"})


def elide_rounding(nest: LoopNest) -> LoopNest:
    """Drop the roundings between calls; the results are nearer to exact arithmetic and need fewer conversions.

    A cast that the model wrote, and the last rounding before a store, stay.
    """
    made: list[Node] = []
    at: list[int] = []
    for node in nest.nodes:
        moved = renumber(node, at)
        if isinstance(moved, Cast) and moved.dtype in _WIDE:
            inner = made[moved.value]
            if isinstance(inner, Cast) and inner.implied and made[inner.value].dtype == moved.dtype:
                at.append(inner.value)
                continue
        at.append(len(made))
        made.append(moved)
    stores = tuple(Store(s.access, at[s.value]) for s in nest.stores)
    return prune(LoopNest(nest.axes, nest.inner, tuple(made), stores, nest.requires))
