"""Questions about a nest's nodes: who is needed, who varies along columns, in which pass over them each is known."""

from collections.abc import Mapping, Sequence

import msgspec

from tune_model.tune.loops.ir import Cast, Gather, Index, Inside, Load, LoopNest, Node, Op, Reduce, Store, arguments

__all__ = ["Pass", "along_columns", "passes", "prune", "renumber"]


class Pass(msgspec.Struct, frozen=True):
    """One loop over the columns of a row.

    Attributes:
        rows: Row values computed before it.
        columns: Nodes computed at each column.
        reduces: Reductions it finishes.
        stores: Positions in the nest's stores, of those that write every column.
    """

    rows: tuple[int, ...]
    columns: tuple[int, ...]
    reduces: tuple[int, ...]
    stores: tuple[int, ...]


def renumber(node: Node, order: Mapping[int, int] | Sequence[int]) -> Node:
    """Return the node with its arguments' new positions."""
    match node:
        case Op():
            return Op(node.name, tuple(order[a] for a in node.args), node.dtype)
        case Cast():
            return Cast(order[node.value], node.dtype, node.implied)
        case Reduce():
            return Reduce(node.kind, order[node.value], node.dtype)
        case Load() if node.gather:
            gather = tuple(Gather(order[g.node], g.stride, g.size) for g in node.gather)
            return Load(node.access, node.dtype, node.where, gather)
        case _:
            return node


def _needed(nodes: Sequence[Node], roots: Sequence[int]) -> list[int]:
    found: set[int] = set()
    stack = list(roots)
    while stack:
        n = stack.pop()
        if n not in found:
            found.add(n)
            stack.extend(arguments(nodes[n]))
    return sorted(found)


def prune(nest: LoopNest) -> LoopNest:
    """Drop nodes that no store needs."""
    needed = _needed(nest.nodes, [s.value for s in nest.stores])
    order = {old: new for new, old in enumerate(needed)}
    nodes = tuple(renumber(nest.nodes[n], order) for n in needed)
    stores = tuple(Store(s.access, order[s.value]) for s in nest.stores)
    return LoopNest(nest.axes, nest.inner, nodes, stores, nest.requires)


def along_columns(nest: LoopNest, columns: int | None = None) -> tuple[bool, ...]:
    """Say for each node whether it varies along the inner axes, or along the last `columns` axes."""
    count = nest.inner if columns is None else columns
    result: list[bool] = []

    def moves(strides: Sequence[object]) -> bool:
        return _along(strides, count)

    for node in nest.nodes:
        match node:
            case Load():
                own = moves(node.access.strides) or any(moves(w.strides) for w in node.where)
                result.append(own or any(result[g.node] for g in node.gather))
            case Index():
                result.append(moves(node.strides))
            case Inside():
                result.append(moves(node.bound.strides))
            case Reduce():
                result.append(False)
            case _:
                result.append(any(result[a] for a in arguments(node)))
    return tuple(result)


def _along(strides: Sequence[object], columns: int) -> bool:
    return columns > 0 and any(s != 0 for s in strides[len(strides) - columns :])


def passes(nest: LoopNest) -> tuple[tuple[Pass, ...], tuple[int, ...]]:
    """Schedule a nest with reductions for one row at a time.

    A pass computes what it needs again from loads; an emitter may keep values instead. Each store that writes every
    column is in the first pass that knows its value; the others write once per row, after the last pass.

    Returns:
        The passes, and the row values that are computed after the last one.
    """
    varies = along_columns(nest)
    depth = _depths(nest.nodes)
    reduces = [k for k, n in enumerate(nest.nodes) if isinstance(n, Reduce)]
    stores = [k for k, s in enumerate(nest.stores) if varies[s.value] or _along(s.access.strides, nest.inner)]
    count = max([depth[r] for r in reduces] + [depth[nest.stores[k].value] + 1 for k in stores], default=0)
    result = []
    rows = [k for k in range(len(nest.nodes)) if not varies[k] and not isinstance(nest.nodes[k], Reduce)]
    for p in range(count):
        finished = tuple(r for r in reduces if depth[r] == p + 1)
        stored = tuple(k for k in stores if depth[nest.stores[k].value] == p)
        roots = [a for r in finished for a in arguments(nest.nodes[r])]
        roots += [nest.stores[k].value for k in stored]
        columns = tuple(k for k in _reached(nest.nodes, roots, varies))
        result.append(Pass(tuple(k for k in rows if depth[k] == p), columns, finished, stored))
    return tuple(result), tuple(k for k in rows if depth[k] >= count)


def _reached(nodes: Sequence[Node], roots: Sequence[int], varies: Sequence[bool]) -> list[int]:
    found: set[int] = set()
    stack = [r for r in roots if varies[r]]
    while stack:
        n = stack.pop()
        if n not in found:
            found.add(n)
            stack.extend(a for a in arguments(nodes[n]) if varies[a])
    return sorted(found)


def _depths(nodes: Sequence[Node]) -> list[int]:
    """How many passes must be over before a node is known."""
    depth: list[int] = []
    for node in nodes:
        known = max((depth[a] for a in arguments(node)), default=0)
        depth.append(known + isinstance(node, Reduce))
    return depth
