"""A product as several of the library's, each over a range of its columns: a merged projection run unmerged.

Merging q, k and v is decided before anything is measured; this is the other way to run them, so that the merge has to
win on the stopwatch too (`library_halves` does the same for gate and up). The ranges of the weight are views, and each
product is written where its columns lie, so the weight stays one and nobody after it notices.

A form does not say what was merged into it, so the usual divisions are tried: queries beside as many or fewer keys and
values, and halves (keys and values alone).
"""

from collections.abc import Iterator
from itertools import accumulate, pairwise
from typing import Final

from tune_model.extract.task import Task
from tune_model.runtime.kernel import Kernel
from tune_model.runtime.program import Call, FormKind, Items, Ref, Size
from tune_model.tune.candidate import Built, Config, Effort, Rejected
from tune_model.tune.loops.rest import MatmulParts, take_apart
from tune_model.tune.relayout import TRANSPOSED, Layouts
from tune_model.tune.search.order import thin
from tune_model.tune.target import CudaTarget, Target
from tune_model.tune.triton.matmul_plan import transposed_weight
from tune_model.tune.triton.matmul_space import with_layouts

__all__ = ["FAMILY", "AtenParts", "divisions"]

_GROUPED: Final = (4, 1, 8, 2, 3, 6, 5, 7)
"""Query heads for each head of keys and values, the commonest first."""

_UNIT: Final = 16
"""Heads have a multiple of so many columns."""

_MOST_COLUMNS: Final = 1 << 16
"""Wider products are heads over a vocabulary, which nobody merged."""


class AtenParts:
    """See the module."""

    name = "aten_parts"
    version = 1
    kinds: frozenset[FormKind] = frozenset({"matmul"})

    def accepts(self, task: Task, target: Target) -> Rejected | None:
        """Accept a linear layer, and nothing after it, whose columns could be several layers'."""
        parts = _read(task)
        return parts if isinstance(parts, Rejected) else None

    def start(self, task: Task, target: Target) -> Config:
        """Return the commonest division."""
        return next(self.configurations(task, target, Effort.QUICK))

    def configurations(self, task: Task, target: Target, effort: Effort) -> Iterator[Config]:
        """Yield divisions; on a GPU also for the weight stored as its transpose."""
        parts = _read(task)
        if isinstance(parts, Rejected):
            return
        spaces: list[Config] = [(("parts", "+".join(map(str, sizes))),) for sizes in divisions(parts.n)]
        turned = isinstance(target, CudaTarget) and not isinstance(transposed_weight(task), Rejected)
        yield from thin(with_layouts(spaces, spaces if turned else (), every=2), effort, 0.2 if turned else 0.1)

    def build(self, task: Task, config: Config, target: Target) -> Built | Rejected:
        """State the calls."""
        parts = _read(task)
        if isinstance(parts, Rejected):
            return parts
        values = dict(config)
        sizes = [int(size) for size in str(values["parts"]).split("+")]
        layouts: Layouts = ((parts.weight, TRANSPOSED),) if values["layout"] == TRANSPOSED else ()
        return Built(Kernel(tuple(_calls(parts, sizes)), layouts=layouts), {})


def divisions(n: int) -> tuple[tuple[int, ...], ...]:
    """Return how many columns each part may have, the likeliest division first."""
    found: dict[tuple[int, ...], None] = {}
    for place, ratio in enumerate(_GROUPED):
        if n % ((ratio + 2) * _UNIT) == 0:
            unit = n // (ratio + 2)
            found[ratio * unit, unit, unit] = None
        if place == 1 and n % (2 * _UNIT) == 0:
            found[n // 2, n // 2] = None
    return tuple(found)


def _read(task: Task) -> MatmulParts | Rejected:
    parts = take_apart(task.form)
    if isinstance(parts, Rejected):
        return parts
    if parts.op != "aten.linear" or parts.rest or parts.before or task.form.results[0].name != parts.product:
        return Rejected("unsupported", "not a linear layer alone")
    if 0 in (parts.m, parts.n, parts.k):
        return Rejected("unsupported", "an empty matmul")
    if parts.n > _MOST_COLUMNS or not divisions(parts.n):
        return Rejected("unsupported", f"{parts.n} columns that are no merged layers'")
    return parts


def _calls(parts: MatmulParts, sizes: list[int]) -> Iterator[Call]:
    rows = Size(f"{parts.a}.size0")
    yield Call("aten.new_empty.default", (Ref(parts.a), Items((rows, parts.n))), (), (parts.product,))
    for number, (start, end) in enumerate(pairwise(accumulate(sizes, initial=0))):
        given = [parts.weight, *([] if parts.bias is None else [parts.bias])]
        cuts = [f"{name}p{number}" for name in given]
        for name, cut in zip(given, cuts, strict=True):
            yield Call("aten.slice.Tensor", (Ref(name), 0, start, end), (), (cut,))
        columns = f"{parts.product}p{number}"
        yield Call("aten.slice.Tensor", (Ref(parts.product), 1, start, end), (), (columns,))
        factors = (Ref(parts.a), *(Ref(cut) for cut in cuts))
        yield Call("aten.linear.out", factors, (("out", Ref(columns)),), ())


FAMILY = AtenParts()
