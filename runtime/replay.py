"""The replay table: for every form, which kernel won at which grid point, and the rule that picks one for a call.

Types and pure rules; binding kernels to memory is in `binding`, counting hits and misses in `coverage`.
"""

import math
from collections.abc import Mapping

import msgspec

from tune_model.runtime.expression import evaluate
from tune_model.runtime.kernel import Aligned, Kernel, Multiple, Requirement, Within
from tune_model.runtime.program import Form, TensorType

__all__ = ["Entry", "Replay", "Selection", "contiguous_strides", "select", "slot_sizes", "unmet"]


class Entry(msgspec.Struct, frozen=True, omit_defaults=True):
    """What the tuner decided for one form at one grid point.

    Attributes:
        dims: One value for each of the form's dims.
        task: Key of the task that was tuned.
        candidate: Label of the winner, for people: `triton_gemv(block_n=1, block_k=2048, num_warps=8)`.
        kernel: The winner. The baseline, when it won, is a kernel too: its steps are ATen calls.
        median_us: The winner's time.
        baseline_us: The extern's time, measured in the same race.
        gain_low: Lower end of the 95 % interval of baseline / winner.
        gain_high: Upper end.
    """

    dims: tuple[int, ...]
    task: str
    candidate: str
    kernel: Kernel
    median_us: float
    baseline_us: float
    gain_low: float
    gain_high: float


class Replay(msgspec.Struct, frozen=True):
    """All entries by the form's fingerprint."""

    forms: dict[str, tuple[Entry, ...]]


class Selection(msgspec.Struct, frozen=True):
    """What a call runs.

    Attributes:
        entry: The entry it came from; `None` when nothing legal is tuned and the form's own body runs.
        exact: The grid holds exactly this point.
        reasons: Why nearer entries were passed over.
    """

    entry: Entry | None
    exact: bool
    reasons: tuple[str, ...] = ()


def contiguous_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return row-major strides in elements."""
    strides = [1] * len(shape)
    for i in range(len(shape) - 2, -1, -1):
        strides[i] = strides[i + 1] * max(shape[i + 1], 1)
    return tuple(strides)


def slot_sizes(form: Form) -> dict[str, int]:
    """Return what `a0.size1` and `a0.stride0` mean for a concrete form, for every parameter and result."""
    values: dict[str, int] = {}
    for parameter in (*form.parameters, *form.results):
        shape, strides = _layout(parameter.type)
        for axis, (size, stride) in enumerate(zip(shape, strides, strict=True)):
            values[f"{parameter.name}.size{axis}"] = size
            values[f"{parameter.name}.stride{axis}"] = stride
    return values


def _layout(type_: TensorType) -> tuple[tuple[int, ...], tuple[int, ...]]:
    shape = tuple(evaluate(s, {}) for s in type_.shape)
    if type_.strides is None:
        return shape, contiguous_strides(shape)
    return shape, tuple(evaluate(s, {}) for s in type_.strides)


def unmet(requirement: Requirement, sizes: Mapping[str, int], addresses: Mapping[str, int]) -> str | None:
    """Say why a requirement does not hold for a call; `None` when it does.

    Args:
        requirement: What a kernel needs.
        sizes: From `slot_sizes`.
        addresses: Address of each slot; a missing slot counts as aligned (the runtime allocates it).
    """
    match requirement:
        case Within(expression, low, high):
            value = evaluate(expression, sizes)
            return None if low <= value <= high else f"{expression} is {value}; needs {low} to {high}"
        case Multiple(expression, of):
            value = evaluate(expression, sizes)
            return None if value % of == 0 else f"{expression} is {value}; needs a multiple of {of}"
        case Aligned(slot, size_bytes):
            if addresses.get(slot, 0) % size_bytes == 0:
                return None
            return f"{slot} is not aligned to {size_bytes} bytes"


def _distance(a: tuple[int, ...], b: tuple[int, ...]) -> float:
    return sum(abs(math.log2((x + 1) / (y + 1))) for x, y in zip(a, b, strict=True))


def select(
    entries: tuple[Entry, ...], dims: tuple[int, ...], sizes: Mapping[str, int], addresses: Mapping[str, int]
) -> Selection:
    """Pick the entry for a call: the exact grid point, else the nearest (log distance) whose kernel is legal.

    Args:
        entries: Of the form, in any order.
        dims: The call's value for each of the form's dims.
        sizes: From `slot_sizes` of the form bound to `dims`.
        addresses: Address of each slot.
    """
    reasons: list[str] = []
    for entry in sorted(entries, key=lambda e: (_distance(e.dims, dims), e.dims)):
        problems = [p for r in entry.kernel.requires if (p := unmet(r, sizes, addresses)) is not None]
        if not problems:
            return Selection(entry, exact=entry.dims == dims, reasons=tuple(reasons))
        reasons.append(f"{entry.candidate} tuned at {entry.dims}: {problems[0]}")
    return Selection(None, exact=False, reasons=tuple(reasons))
