"""Prints what reductions accumulate: per lane of a tile, per split of a row, and the row's value from either.

A lane's accumulators after a loop and a split's partial results are the same thing, a tile of partial results that is
joined along its columns, so one set of formulas serves both. A `Pair` of reductions (tune/loops/online.py) accumulates
in one pass: the sum of exponentials relative to the largest so far; the sum of squares by Youngs' and Cramer's update
(T. F. Chan, G. H. Golub, R. J. LeVeque, "Algorithms for computing the sample variance", 1983) of each lane's distance
from its first element, so that a mean far from zero costs no digits.
"""

from collections.abc import Sequence
from typing import NamedTuple

from tune_model.tune.loops.ir import LoopNest, Reduce
from tune_model.tune.loops.online import Pair
from tune_model.tune.triton.emit import DTYPES, node_dtype

__all__ = [
    "Counts", "Field", "Tile", "Unit", "identity_of", "join_first", "join_second", "leave", "start", "take", "whole"
]  # fmt: skip

_WITH = "tl.reduce({{0}}, {{1}}, numeric.{0}, keep_dims=True)"

# Kind: identity for floats, for integers; how two parts combine; how a tile reduces.
_KINDS = {
    "sum": ("0.0", "0", "{0} + {1}", "tl.sum({0}, axis={1}, keep_dims=True)"),
    "prod": ("1.0", "1", "{0} * {1}", _WITH.format("multiply")),
    "max": ("float('-inf')", "low", "numeric.maximum({0}, {1})", _WITH.format("maximum")),
    "min": ("float('inf')", "high", "numeric.minimum({0}, {1})", _WITH.format("minimum")),
    "any": ("0", "0", "{0} | {1}", "tl.max({0}, axis={1}, keep_dims=True)"),
    "all": ("1", "1", "{0} & {1}", "tl.min({0}, axis={1}, keep_dims=True)"),
    "argmax": ("float('-inf')", "low", ">", _WITH.format("maximum")),
    "argmin": ("float('inf')", "high", "<", _WITH.format("minimum")),
}
_BITS = {"int8": 8, "int16": 16, "int32": 32, "int64": 64}
_LARGEST = {"float32": 3.4028234663852886e38, "float64": 1.7976931348623157e308}
_NOWHERE = 2**31 - 1

_SQUARES = ("base", "drift", "spread")
"""A value near the mean; the sum of the differences from it; the sum of the squared differences from the mean."""


class Tile(NamedTuple):
    """Rows and columns that a program holds at a time.

    One row is a vector, not a matrix of one row: Triton would spread its threads over the rows.

    Attributes:
        nest: What is printed.
        rows: Of the tile.
    """

    nest: LoopNest
    rows: int

    @property
    def axis(self) -> int:
        """The axis of the columns."""
        return 0 if self.rows == 1 else 1

    @property
    def rank(self) -> int:
        """How many axes there are."""
        return self.axis + 1

    @property
    def shape(self) -> str:
        """The text of its shape."""
        return "[BLOCK]" if self.rows == 1 else f"[{self.rows}, BLOCK]"

    @property
    def one(self) -> str:
        """The text of the shape of a single value."""
        return "[1]" if self.rows == 1 else "[1, 1]"

    def along(self, size: str) -> str:
        """Return the text of the numbers from 0 along the columns."""
        return f"tl.arange(0, {size})" if self.rows == 1 else f"tl.arange(0, {size})[None, :]"

    def reduced(self, kind: str, text: str) -> str:
        """Return the text of a tile reduced to one value per row."""
        return _KINDS[kind][3].format(text, self.axis)

    def total(self, text: str) -> str:
        """Return the text of a tile's sums."""
        return self.reduced("sum", text)


class Field(NamedTuple):
    """One number of a partial result: the variable that holds its tile, and its element type."""

    name: str
    dtype: str


class Unit(NamedTuple):
    """What accumulates together.

    Attributes:
        position: Of the reduction, or of the first of a pair.
        pair: The pair, if it is one.
    """

    position: int
    pair: Pair | None = None

    def fields(self, nest: LoopNest) -> tuple[Field, ...]:
        """Return the numbers of a partial result."""
        node = _reduce(nest, self.position)
        first = Field(f"acc{self.position}", accumulator(nest, node))
        if self.pair is not None:
            second = self.pair.second
            names = [f"acc{second}"] if self.pair.kind == "exponentials" else [f"{n}{second}" for n in _SQUARES]
            return (first, *(Field(name, first.dtype) for name in names))
        if node.kind in {"argmax", "argmin"}:
            return (first, Field(f"at{self.position}", "int32"))
        return (first,)


class Counts(NamedTuple):
    """How many columns each part of a tile of partial results stands for, and how many all of them do, as texts."""

    parts: str
    total: str


def _reduce(nest: LoopNest, position: int) -> Reduce:
    node = nest.nodes[position]
    if not isinstance(node, Reduce):
        raise TypeError(f"node {position} is no reduction")
    return node


def accumulator(nest: LoopNest, node: Reduce) -> str:
    """Return the dtype a reduction runs in."""
    if node.kind in {"any", "all"}:
        return "int32"
    if node.kind in {"argmax", "argmin", "max", "min"}:
        dtype = node_dtype(nest.nodes[node.value])
        return "int32" if dtype in {"bool", "uint8"} else "float32" if dtype in {"float16", "bfloat16"} else dtype
    return node.dtype


def identity_of(kind: str, dtype: str) -> str:
    """Return the text of what changes nothing when it is combined."""
    of_floats, of_integers, _, _ = _KINDS[kind]
    if _is_float(dtype):
        return of_floats
    limit = 1 << (_BITS[dtype] - 1)
    return {"low": str(-limit), "high": str(limit - 1)}.get(of_integers, of_integers)


def _is_float(dtype: str) -> bool:
    return dtype.startswith(("float", "bfloat"))


def start(tile: Tile, unit: Unit, columns: str) -> list[str]:
    """Print the accumulators of a loop at their identity; `columns` are those of its first step."""
    nest = tile.nest
    node = _reduce(nest, unit.position)
    first, *more = unit.fields(nest)
    shape = tile.shape
    lines = [f"{first.name} = tl.full({shape}, {identity_of(node.kind, first.dtype)}, {DTYPES[first.dtype]})"]
    if unit.pair is not None:
        lines += [f"{field.name} = tl.zeros({shape}, {DTYPES[first.dtype]})" for field in more]
        if unit.pair.kind == "squares":
            lines.append(f"seen{unit.position} = tl.zeros({tile.one}, {DTYPES[first.dtype]})")
    elif more:
        # A lane in which nothing beats the identity holds its first column.
        lines.append(f"{more[0].name} = ({columns} + tl.zeros({shape}, tl.int32)).to(tl.int32)")
    return lines


def _part(tile: Tile, node: Reduce, value: str, inside: str | None) -> str:
    """Return the text of a tile to accumulate: outside it is the identity."""
    dtype = accumulator(tile.nest, node)
    source = f"{value}.to({DTYPES[dtype]})" if node.kind not in {"any", "all"} else f"({value} != 0).to(tl.int32)"
    if inside is None:
        return f"tl.broadcast_to({source}, {tile.shape})"
    identity = f"tl.full({tile.one}, {identity_of(node.kind, dtype)}, {DTYPES[dtype]})"
    return f"tl.where({inside}, {source}, {identity})"


def take(tile: Tile, unit: Unit, value: str, inside: str | None) -> list[str]:
    """Print taking one tile of columns into the accumulators.

    Args:
        tile: What is printed.
        unit: What accumulates.
        value: Variable that holds the values.
        inside: Mask of the columns that exist; `None` when all do.
    """
    nest = tile.nest
    node = _reduce(nest, unit.position)
    part = f"part{unit.position}"
    lines = [f"{part} = {_part(tile, node, value, inside)}"]
    first, *more = (f.name for f in unit.fields(nest))
    if unit.pair is not None and unit.pair.kind == "exponentials":
        return [*lines, *_take_exponential(unit.pair, part, (first, more[0]), accumulator(nest, node))]
    if unit.pair is not None:
        return [*lines, f"{first} += {part}", *_take_square(unit.pair, part, more, inside)]
    combine = _KINDS[node.kind][2]
    if not more:
        return [*lines, f"{first} = {combine.format(first, part)}"]
    # Columns ascend, so of equals the one that is there stays; the first NaN beats everything and stays.
    better = f"{part} {combine} {first}"
    if _is_float(accumulator(nest, node)):
        better = f"({better}) | (({part} != {part}) & ({first} == {first}))"
    return [
        *lines,
        f"better{unit.position} = {better}",
        f"{first} = tl.where(better{unit.position}, {part}, {first})",
        f"{more[0]} = tl.where(better{unit.position}, columns, {more[0]})",
    ]


def _finite(pair: Pair, text: str, dtype: str) -> str:
    """Return the text of what exponentials are relative to: never -inf, so that nothing yet is not NaN."""
    limit = _LARGEST[dtype]
    low = f"tl.maximum({text}, {-limit})"
    return f"tl.minimum({low}, {limit})" if pair.guarded else low


def _take_exponential(pair: Pair, part: str, names: tuple[str, str], dtype: str) -> list[str]:
    """Print one exponential per element: of two terms, the one of the larger is exp(0)."""
    top, total = names
    reached = f"tl.minimum({part}, {_LARGEST[dtype]})" if pair.guarded else part
    return [
        f"gap{pair.first} = {reached} - {_finite(pair, top, dtype)}",
        f"fade{pair.first} = tl.exp(-tl.abs(gap{pair.first}))",
        f"{total} = tl.where(gap{pair.first} > 0, {total} * fade{pair.first} + 1.0, {total} + fade{pair.first})",
        f"{top} = numeric.maximum({top}, {part})",
    ]


def _take_square(pair: Pair, part: str, names: Sequence[str], inside: str | None) -> list[str]:
    base, drift, spread = names
    seen, step, gap = f"seen{pair.first}", f"step{pair.first}", f"gap{pair.first}"

    def there(text: str) -> str:
        return text if inside is None else f"tl.where({inside}, {text}, 0.0)"

    return [
        f"{base} = tl.where({seen} == 0.0, {part}, {base})",
        f"{seen} += 1.0",
        f"{step} = {there(f'{part} - {base}')}",
        f"{drift} += {step}",
        f"{gap} = {there(f'{seen} * {step} - {drift}')}",
        f"{spread} += {gap} * {gap} * (1.0 / tl.maximum({seen} * ({seen} - 1.0), 1.0))",
    ]


def whole(tile: Tile, position: int, name: str, value: str, inside: str | None) -> list[str]:
    """Print the reduction of a tile that holds all columns; `name` is the row's value."""
    node = _reduce(tile.nest, position)
    part = f"part{position}"
    lines = [f"{part} = {_part(tile, node, value, inside)}"]
    if node.kind in {"argmax", "argmin"}:
        return [*lines, _place(tile, node.kind, name, (part, "columns"))]
    return [*lines, _joined(tile, node.kind, name, part)]


def _joined(tile: Tile, kind: str, name: str, text: str) -> str:
    value = tile.reduced(kind, text)
    return f"{name} = {value} != 0" if kind in {"any", "all"} else f"{name} = {value}"


def _place(tile: Tile, kind: str, name: str, parts: tuple[str, str], dtype: str = "int64") -> str:
    """Print the first place of the largest or smallest, or of a NaN; `parts` are values and their places."""
    values, places = parts
    hits = f"({values} == {tile.reduced(kind, values)}) | ({values} != {values})"
    return f"{name} = {tile.reduced('all', f'tl.where({hits}, {places}, {_NOWHERE})')}.to({DTYPES[dtype]})"


def join_first(tile: Tile, unit: Unit, name: str) -> list[str]:
    """Print a row's value from a tile of partial results: of a pair, the first's."""
    node = _reduce(tile.nest, unit.position)
    fields = unit.fields(tile.nest)
    if node.kind in {"argmax", "argmin"}:
        return [_place(tile, node.kind, name, (fields[0].name, fields[1].name))]
    return [_joined(tile, node.kind, name, fields[0].name)]


def join_second(tile: Tile, pair: Pair, name: str, center: str, counts: Counts) -> list[str]:
    """Print the value of a pair's second reduction, relative to the row value `center`."""
    first, *more = Unit(pair.first, pair).fields(tile.nest)
    if pair.kind == "exponentials":
        fade = f"tl.exp({_finite(pair, first.name, first.dtype)} - {center})"
        return [f"{name} = {tile.total(f'{more[0].name} * {fade}')}"]
    base, drift, spread = (field.name for field in more)
    parts, off = f"({counts.parts}).to({DTYPES[first.dtype]})", f"off{pair.second}"
    return [
        f"{off} = ({base} - {center}) + {drift} / tl.maximum({parts}, 1.0)",
        f"{name} = {tile.total(f'{spread} + {parts} * {off} * {off}')}",
    ]


def leave(tile: Tile, unit: Unit, counts: Counts) -> tuple[list[str], Sequence[str]]:
    """Print the partial result of all lanes together.

    Returns:
        The lines, and the variables that hold the fields, one value per row each.
    """
    node = _reduce(tile.nest, unit.position)
    fields = unit.fields(tile.nest)
    made = [f"left_{f.name}" for f in fields]
    lines = [f"{made[0]} = {tile.reduced(node.kind, fields[0].name)}"]
    if unit.pair is None:
        if len(fields) > 1:
            lines.append(_place(tile, node.kind, made[1], (fields[0].name, fields[1].name), "int32"))
        return lines, made
    dtype = DTYPES[fields[0].dtype]
    if unit.pair.kind == "exponentials":
        lines.append(f"center{unit.position} = {_finite(unit.pair, made[0], fields[0].dtype)}")
        return [*lines, *join_second(tile, unit.pair, made[1], f"center{unit.position}", counts)], made
    base, drift, spread = made[1:]
    total = f"({counts.total}).to({dtype})"
    parts = f"({counts.parts}).to({dtype})"
    lines += [
        f"{base} = {made[0]} / {total}",
        f"{drift} = {tile.total(f'{fields[2].name} + {parts} * ({fields[1].name} - {base})')}",
        *join_second(tile, unit.pair, spread, base, counts),
        # The base is the mean but for its rounding.
        f"{spread} -= {drift} * {drift} / {total}",
    ]
    return lines, made
