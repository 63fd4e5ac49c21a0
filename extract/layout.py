"""Where a tensor's elements lie: strides of views over symbolic sizes, and which reshapes are views at all.

After `rewrite.spelling` a program knows four views: `aten.view`, `aten.permute`, `aten.expand` and `aten.slice`.
"""

import zlib
from functools import lru_cache
from typing import NamedTuple

from tune_model.extract.algebra import Polynomial, polynomial, same, tidy
from tune_model.runtime.expression import Dim, evaluate, symbols
from tune_model.runtime.program import Arg, Call, Items, Size, TensorType

__all__ = [
    "VIEWS",
    "View",
    "arg_dim",
    "dim_arg",
    "in_order_of",
    "is_row_major",
    "magnitude",
    "make_type",
    "row_major",
    "size_args",
    "strides_of",
    "view",
    "view_strides",
]

VIEWS = frozenset({"aten.view.default", "aten.permute.default", "aten.expand.default", "aten.slice.Tensor"})

ONE = polynomial(1)


class View(NamedTuple):
    """What a view call gives: its type, and how far its first element lies after its argument's, in elements."""

    type: TensorType
    offset: Polynomial


@lru_cache(maxsize=16384)
def row_major(shape: tuple[Dim, ...]) -> tuple[Dim, ...]:
    """Return contiguous strides."""
    strides: list[Dim] = []
    run = ONE
    for size in reversed(shape):
        strides.append(run.dim)
        run *= polynomial(size)
    return tuple(reversed(strides))


def strides_of(type_: TensorType) -> tuple[Dim, ...]:
    """Return a type's strides, written out."""
    return row_major(type_.shape) if type_.strides is None else type_.strides


@lru_cache(maxsize=16384)
def _is_row_major(shape: tuple[Dim, ...], strides: tuple[Dim, ...]) -> bool:
    run = ONE
    for size, stride in zip(reversed(shape), reversed(strides), strict=True):
        if size != 1:
            if polynomial(stride) != run:
                return False
            run *= polynomial(size)
    return True


def is_row_major(type_: TensorType) -> bool:
    """Say whether a type is contiguous; strides of dims of size 1 do not matter."""
    return type_.strides is None or _is_row_major(type_.shape, type_.strides)


@lru_cache(maxsize=16384)
def make_type(dtype: str, shape: tuple[Dim, ...], strides: tuple[Dim, ...] | None = None) -> TensorType:
    """Make a type with canonical texts, `strides=None` where they are row-major."""
    shape = tuple(tidy(s) for s in shape)
    if strides is None or _is_row_major(shape, strides):
        return TensorType(dtype, shape)
    return TensorType(dtype, shape, tuple(tidy(s) for s in strides))


@lru_cache(maxsize=16384)
def magnitude(dim: Dim) -> int:
    """Evaluate a stride with every symbol somewhere above a thousand, to compare strides by size."""
    return evaluate(dim, {s: 1000 + zlib.crc32(s.encode()) % 1000 for s in symbols(dim)})


def in_order_of(type_: TensorType, like: TensorType) -> TensorType | None:
    """Return the dense type whose dims lie in memory in the order of another type's of the same shape.

    `None` if that has no order (a broadcast dim), or one in which the last dim is not the innermost.
    """
    strides = strides_of(like)
    dims = [i for i, n in enumerate(type_.shape) if n != 1]
    if any(strides[i] == 0 for i in dims):
        return None
    dims.sort(key=lambda i: (-magnitude(strides[i]), i))
    if dims and dims[-1] != max(dims):
        return None
    dense: list[Dim] = [1] * len(type_.shape)
    run = ONE
    for i in reversed(dims):
        dense[i] = run.dim
        run *= polynomial(type_.shape[i])
    return make_type(type_.dtype, type_.shape, tuple(dense))


def dim_arg(dim: Dim) -> Arg:
    """Return a size as a call's argument."""
    return dim if isinstance(dim, int) else Size(dim)


def arg_dim(arg: Arg) -> Dim:
    """Return an integer argument as a size."""
    if isinstance(arg, Size):
        return arg.expression
    if isinstance(arg, int):
        return int(arg)
    raise TypeError(f"expected an integer argument, got {arg!r}")


def size_args(shape: tuple[Dim, ...]) -> Items:
    """Return a shape as a call's argument."""
    return Items(tuple(dim_arg(s) for s in shape))


@lru_cache(maxsize=16384)
def view_strides(type_: TensorType, shape: tuple[Dim, ...]) -> tuple[Dim, ...] | None:
    """Return the strides of a reshape, or `None` when it has to copy (for some value of the symbols).

    The rule of `at::computeStride`: runs of dims that lie back to back in memory may be cut anywhere.
    """
    old = [(polynomial(n), polynomial(s)) for n, s in zip(type_.shape, strides_of(type_), strict=True) if n != 1]
    new = [polynomial(n) for n in shape]
    strides: list[Dim] = [1] * len(new)
    at = len(new) - 1
    while at >= 0 and new[at] == ONE:
        at -= 1
    while old:
        size, base = old.pop()
        while old and old[-1][1] == size * base:
            size *= old.pop()[0]
        run = ONE
        while at >= 0 and run != size:
            strides[at] = (run * base).dim
            run *= new[at]
            at -= 1
        if run != size:
            return None
        while at >= 0 and new[at] == ONE:
            strides[at] = (run * base).dim
            at -= 1
    return tuple(strides) if at < 0 else None


def _dims(arg: Arg) -> tuple[Dim, ...]:
    if not isinstance(arg, Items):
        raise TypeError(f"expected a list of sizes, got {arg!r}")
    return tuple(arg_dim(a) for a in arg.items)


def view(call: Call, source: TensorType) -> View | None:
    """Return what one of the four view calls gives for an argument of type `source`; `None` if it cannot be a view."""
    shape, strides = source.shape, strides_of(source)
    zero = polynomial(0)
    match call.op:
        case "aten.view.default":
            target = _dims(call.args[1])
            found = view_strides(source, target)
            return None if found is None else View(make_type(source.dtype, target, found), zero)
        case "aten.permute.default":
            order = [int(d) for d in _dims(call.args[1])]
            return View(make_type(source.dtype, tuple(shape[d] for d in order), tuple(strides[d] for d in order)), zero)
        case "aten.expand.default":
            target = _dims(call.args[1])
            lead = len(target) - len(shape)
            kept = [same(s, t) for s, t in zip(shape, target[lead:], strict=True)]
            widened = (*[0] * lead, *[s if k else 0 for s, k in zip(strides, kept, strict=True)])
            return View(make_type(source.dtype, target, widened), zero)
        case "aten.slice.Tensor":
            dim = int(arg_dim(call.args[1]))
            start, end = polynomial(arg_dim(call.args[2])), polynomial(arg_dim(call.args[3]))
            step = int(arg_dim(call.args[4])) if len(call.args) > 4 else 1
            count = end - start
            if step != 1:
                count = polynomial(f"cdiv({count.dim}, {step})")
            sizes = (*shape[:dim], count.dim, *shape[dim + 1 :])
            stride = polynomial(strides[dim])
            return View(
                make_type(source.dtype, sizes, (*strides[:dim], (stride * polynomial(step)).dim, *strides[dim + 1 :])),
                start * stride,
            )
    raise ValueError(f"{call.op} is not a view")
