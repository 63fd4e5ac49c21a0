"""A region before it is canonical: its calls, what they read, what is read of them. Types only."""

from typing import Literal, NamedTuple

from tune_model.runtime.program import Call, FormKind, TensorType, ValueRange

__all__ = ["Operand", "Region"]


class Operand(NamedTuple):
    """A tensor that a region reads.

    Attributes:
        name: What the region's calls name it.
        value: The program value that is handed over: the earliest one that starts at the same element.
        type: As the calls see it: a view of `value`.
        role: Of the form's parameter.
        values: What to fill it with when measuring.
    """

    name: str
    value: str
    type: TensorType
    role: Literal["activation", "weight", "cache"]
    values: ValueRange | None


class Region(NamedTuple):
    """Calls that become one form.

    Attributes:
        kind: Of the form.
        calls: In order; views among them read the region's own values, or cut operands that it also reads whole.
        operands: What they read.
        results: Values that something outside reads, in the order they are made.
    """

    kind: FormKind
    calls: tuple[Call, ...]
    operands: tuple[Operand, ...]
    results: tuple[str, ...]
