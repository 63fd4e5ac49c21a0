"""Convolutions over patches that do not overlap are products: each patch is a row, and the kernel a weight matrix.

Vision transformers cut their pictures so, and some models of video and sound. As a product it is tuned like any other.
"""

import math
from collections.abc import Iterator
from itertools import chain

from tune_model.extract.layout import VIEWS, make_type, size_args
from tune_model.extract.regions.vocabulary import OpClass, classify
from tune_model.extract.rewrite import schema
from tune_model.extract.rewrite.graph import READ_BY_CALLER, Graph
from tune_model.extract.rewrite.linears import LINEAR
from tune_model.extract.rewrite.relayout import relayout
from tune_model.extract.rewrite.viewing import add_copy, add_view
from tune_model.runtime.expression import Dim
from tune_model.runtime.program import Arg, Call, Items, Program, Ref

__all__ = ["multiply_patches"]

_SPATIAL = {
    "aten.conv1d.default": 1,
    "aten.conv1d.padding": 1,
    "aten.conv2d.default": 2,
    "aten.conv2d.padding": 2,
    "aten.conv3d.default": 3,
    "aten.conv3d.padding": 3,
}
_ANY_LAYOUT = frozenset({OpClass.POINTWISE, OpClass.JOIN, OpClass.NORMALISE, OpClass.REDUCE, OpClass.COPY})


def multiply_patches(program: Program) -> Program:
    """Replace convolutions whose stride is their kernel's size by linear layers over copied patches."""
    graph = Graph(program)
    for index, step in enumerate(graph.steps):
        if step.op in _SPATIAL and step.results[0] is not None:
            patch = _patch(graph, step)
            if patch is not None:
                _multiply(graph, index, step, patch)
    return relayout(graph.finish())


def _patch(graph: Graph, step: Call) -> tuple[int, ...] | None:
    """Return the size of the patches that a convolution multiplies; `None` if it does anything else."""
    given = schema.arguments(step)
    source, weight = given["input"], given["weight"]
    if not isinstance(source, Ref) or not isinstance(weight, Ref):
        return None
    shape, kernel = graph.type(source.name).shape, graph.type(weight.name).shape
    rank = _SPATIAL[step.op]
    plain = _all(given["dilation"], 1) and given["groups"] == 1
    unpadded = given["padding"] == "valid" or _all(given["padding"], 0)
    size = tuple(n for n in kernel[2:] if isinstance(n, int))
    if len(shape) != rank + 2 or len(size) != rank or not plain or not unpadded or set(size) == {1}:
        return None
    if tuple(_numbers(given["stride"], rank)) != size:
        return None
    whole = all(isinstance(n, int) and n % k == 0 for n, k in zip(shape[2:], size, strict=True))
    return size if whole and isinstance(shape[1], int) else None


def _numbers(arg: Arg, rank: int) -> Iterator[int]:
    items = arg.items if isinstance(arg, Items) else (arg,)
    found = [int(item) for item in items if isinstance(item, int)]
    yield from found * rank if len(found) == 1 else found


def _all(arg: Arg, value: int) -> bool:
    return set(_numbers(arg, 1)) == {value}


def _multiply(graph: Graph, index: int, step: Call, patch: tuple[int, ...]) -> None:
    source, weight, bias = (schema.arguments(step)[name] for name in ("input", "weight", "bias"))
    result = step.results[0]
    if not isinstance(source, Ref) or not isinstance(weight, Ref) or result is None:
        return
    batch, channels, *space = graph.type(source.name).shape
    filters = graph.type(weight.name).shape[0]
    rank = len(patch)
    counts: list[Dim] = [int(n) // k for n, k in zip(space, patch, strict=True)]

    def seen(name: str, op: str, *items: Dim) -> str:
        return add_view(graph, index, op, name, size_args(items))

    cut = seen(source.name, "aten.view.default", batch, channels, *chain.from_iterable(zip(counts, patch, strict=True)))
    places = range(2, 2 + 2 * rank, 2)
    ordered = seen(cut, "aten.permute.default", 0, *places, 1, *(place + 1 for place in places))
    rows = seen(add_copy(graph, index, ordered), "aten.view.default", batch, *counts, channels * math.prod(patch))
    matrix = seen(weight.name, "aten.view.default", filters, channels * math.prod(patch))
    args = (Ref(rows), Ref(matrix), *((bias,) if isinstance(bias, Ref) else ()))
    made = make_type(graph.type(result).dtype, (batch, *counts, filters))
    product = graph.add(index, Call(LINEAR, args), made, result)
    turned = seen(product, "aten.permute.default", 0, rank + 1, *range(1, rank + 1))
    graph.replace(result, turned if _any_layout_will_do(graph, result) else add_copy(graph, index, turned))


def _any_layout_will_do(graph: Graph, name: str) -> bool:
    """Say whether everything that reads a value, through views too, is part of regions, which read any layout."""
    for reader in graph.readers.get(name, ()):
        if reader == READ_BY_CALLER:
            return False
        step = graph.steps[reader]
        if step.op in VIEWS:
            if step.results[0] is None or not _any_layout_will_do(graph, step.results[0]):
                return False
        elif classify(step) not in _ANY_LAYOUT:
            return False
    return True
