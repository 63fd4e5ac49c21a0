"""The loop form: an index space, SSA nodes over it, and stores.

A `LoopNest` runs over `axes`. The last `inner` of them are the columns: reductions run over them, and a node that does
not depend on them is a *row* value. A pointwise nest has `inner == 0`. Nodes are in SSA order and refer to each other
by position. Every rounding is an explicit `Cast`; half-precision arithmetic is float32 arithmetic between casts, so an
emitter needs no rules of promotion. Types only: how a body becomes a nest is in `lower`.

What operators mean (all operands of an `Op` have one dtype, except `where`, whose first is bool):

    neg abs sign floor ceil trunc round(half to even) reciprocal sqrt rsqrt exp exp2 expm1 log log2 log10 log1p
    sin cos tan atan sinh cosh tanh erf sigmoid            IEEE: NaN in, NaN out; sign(NaN) is 0
    add sub mul                                            integers wrap
    div                                                    floats only
    floordiv truncdiv                                      quotient rounded to -inf or to 0, floats and integers
    remainder fmod                                         sign of the divisor, sign of the dividend
    pow atan2
    maximum minimum                                        a NaN operand gives NaN
    eq ne lt le gt ge                                      -> bool; with NaN only `ne` is true
    isnan isinf                                            -> bool
    and or xor not                                         on bool logical, on integers bitwise
    where                                                  (condition, if true, if false)

Reductions over no columns give the identity. `max` and `min` give NaN when any operand is NaN; `argmax` and `argmin`
give the first position (in row-major order of the inner axes) of the largest or smallest, a NaN counting as both.
"""

from typing import Literal

import msgspec

from tune_model.runtime.expression import Dim
from tune_model.runtime.kernel import Requirement

__all__ = [
    "Access",
    "Axis",
    "Bound",
    "Cast",
    "Constant",
    "Gather",
    "Index",
    "Inside",
    "Load",
    "LoopNest",
    "Node",
    "Op",
    "Reduce",
    "ReduceKind",
    "Store",
    "arguments",
]


class Axis(msgspec.Struct, frozen=True):
    """One dimension of the index space.

    Attributes:
        size: At the task's own sizes.
        extent: Equal to `size` when the nest holds for this size only; an expression over slot sizes
            (`a0.size0`) when the same nest serves every size.
    """

    size: int
    extent: Dim


class Access(msgspec.Struct, frozen=True, omit_defaults=True):
    """Where in a slot: element `offset + sum(strides[k] * i[k])`.

    Attributes:
        slot: Name of a parameter or result; `acc`, `acc0`, `acc1` for a matmul's accumulators.
        strides: In elements, one per axis; an expression (`a0.stride0`) where it follows an axis that is not fixed.
        offset: In elements.
    """

    slot: str
    strides: tuple[Dim, ...]
    offset: Dim = 0


class Bound(msgspec.Struct, frozen=True):
    """The condition `low <= offset + sum(strides[k] * i[k]) < high`."""

    strides: tuple[int, ...]
    offset: int
    low: int
    high: int


class Gather(msgspec.Struct, frozen=True):
    """A data-dependent part of an address: adds `node * stride`.

    Attributes:
        node: An integer node; not negative.
        stride: In elements.
        size: The node is less than this; an emitter clamps, so that a bad index never leaves the slot.
    """

    node: int
    stride: int
    size: int


class Load(msgspec.Struct, frozen=True, omit_defaults=True, tag="load"):
    """Read a slot.

    Attributes:
        access: Where.
        dtype: The slot's; nothing is converted.
        where: Outside any of these the address is invalid and the value is not used: mask the access.
        gather: Data-dependent parts of the address.
    """

    access: Access
    dtype: str
    where: tuple[Bound, ...] = ()
    gather: tuple[Gather, ...] = ()


class Constant(msgspec.Struct, frozen=True, tag="constant"):
    """A number; floats may be infinite or NaN."""

    value: bool | int | float
    dtype: str


class Index(msgspec.Struct, frozen=True, tag="index"):
    """The integer `offset + sum(strides[k] * i[k])`."""

    strides: tuple[int, ...]
    offset: int
    dtype: str = "int64"


class Inside(msgspec.Struct, frozen=True, tag="inside"):
    """Whether the index lies inside a bound; pieces of a concatenation are chosen by it."""

    bound: Bound
    dtype: str = "bool"


class Op(msgspec.Struct, frozen=True, tag="op"):
    """An operation; the module docstring lists the names. `dtype` is the result's."""

    name: str
    args: tuple[int, ...]
    dtype: str


class Cast(msgspec.Struct, frozen=True, omit_defaults=True, tag="cast"):
    """Convert as a C cast does (floats to integers truncate; anything to bool compares with 0).

    Attributes:
        value: Node.
        dtype: To.
        implied: The rounding between two ATen calls, not a cast that the model wrote; `elide_rounding` removes these.
    """

    value: int
    dtype: str
    implied: bool = False


ReduceKind = Literal["sum", "prod", "max", "min", "argmax", "argmin", "any", "all"]


class Reduce(msgspec.Struct, frozen=True, tag="reduce"):
    """Reduce a node over the inner axes, in `dtype` (`argmax` and `argmin` compare in the node's and give int64)."""

    kind: ReduceKind
    value: int
    dtype: str


class Store(msgspec.Struct, frozen=True, tag="store"):
    """Write a node of the slot's dtype; a row value is written once per row."""

    access: Access
    value: int


Node = Load | Constant | Index | Inside | Op | Cast | Reduce


class LoopNest(msgspec.Struct, frozen=True):
    """A kernel's worth of loops.

    Attributes:
        axes: Outer axes, then the `inner` ones; at least one outer axis. Adjacent axes that every access can run
            through with one stride are already one.
        inner: How many trailing axes are columns; 0 for pointwise nests.
        nodes: In SSA order.
        stores: One or more per result.
        requires: What must hold for other sizes than the task's own to be legal.
    """

    axes: tuple[Axis, ...]
    inner: int
    nodes: tuple[Node, ...]
    stores: tuple[Store, ...]
    requires: tuple[Requirement, ...] = ()


def arguments(node: Node) -> tuple[int, ...]:
    """Return the nodes that a node reads."""
    match node:
        case Op():
            return node.args
        case Cast() | Reduce():
            return (node.value,)
        case Load():
            return tuple(g.node for g in node.gather)
        case _:
            return ()
