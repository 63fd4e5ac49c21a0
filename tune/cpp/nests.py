"""What the generated families share: lowering a form, its search space, building a configuration."""

import itertools
import math
import time
from collections.abc import Iterable, Iterator

from tune_model.runtime.kernel import Kernel
from tune_model.runtime.program import Form
from tune_model.tune.candidate import Built, Config, Effort, Rejected
from tune_model.tune.cpp.emit import Printed, Shape, Unprintable, print_nest
from tune_model.tune.cpp.library import build_launch
from tune_model.tune.cpp.shared_rows import can_share, print_shared
from tune_model.tune.loops.graph import passes
from tune_model.tune.loops.ir import LoopNest
from tune_model.tune.loops.lower import lower
from tune_model.tune.loops.rounding import elide_rounding
from tune_model.tune.search.order import LIMITS, thin
from tune_model.tune.target import CpuTarget, Target

__all__ = ["build_nest", "nest_for", "nest_space", "shape_of"]

_GRAINS = (4096, 16384, 65536, 1 << 30)
"""Least elements per thread (for pointwise nests also the length of a block); the last keeps to one thread."""

_START = Shape(unroll=2, keep="costly", grain=16384)

_LONG_ROW = 16384
"""Columns below which sharing a row between threads costs more than it saves."""


def nest_for(form: Form, target: Target) -> LoopNest | Rejected:
    """Return the nest to print for a form, without the roundings between calls; or why there is none."""
    if not isinstance(target, CpuTarget):
        return Rejected("unsupported", "a CPU kernel")
    nest = lower(form)
    if isinstance(nest, Rejected):
        return nest
    nest = elide_rounding(nest)
    try:
        print_nest(nest, _START)
    except Unprintable as reason:
        return Rejected("unsupported", str(reason))
    return nest


def shape_of(config: Config) -> Shape:
    """Return the printer's choices that a configuration names."""
    values = dict(config)
    return Shape(int(values["unroll"]), str(values["keep"]), int(values["grain"]), int(values["chunks"]))


def _printed(nest: LoopNest, shape: Shape) -> Printed:
    return print_nest(nest, shape) if shape.chunks == 1 else print_shared(nest, shape)


def nest_space(nest: LoopNest, target: CpuTarget, effort: Effort) -> Iterator[Config]:
    """Yield configurations, the heuristic start first and its neighbours next; few long rows are shared by threads."""
    several = nest.inner > 0 and len(passes(nest)[0]) > 1
    keeps = ("all", "costly", "none") if several else ("costly",)
    space: list[Config] = [
        (("unroll", unroll), ("keep", keep), ("grain", grain), ("chunks", 1))
        for unroll, keep, grain in itertools.product((4, 2, 1), keeps, _GRAINS)
    ]
    start = (("unroll", _START.unroll), ("keep", _START.keep), ("grain", _START.grain), ("chunks", 1))
    ordered = sorted(space, key=lambda c: _steps(c, start))
    rows = math.prod(axis.size for axis in nest.axes[: len(nest.axes) - nest.inner])
    shared = rows < 4 * target.threads and target.threads > 1 and nest.axes[-1].size >= _LONG_ROW
    if shared and can_share(nest):
        parts: list[Config] = [
            (("unroll", unroll), ("keep", _START.keep), ("grain", _START.grain), ("chunks", target.threads * times))
            for times in (1, 4)
            for unroll in (2, 4)
        ]
        ordered = [parts[0], ordered[0], *parts[1:], *ordered[1:]]
    # A compilation takes longer than all timings of what it makes: a quick search makes three.
    share = 3 / LIMITS[Effort.QUICK] if effort is Effort.QUICK else 1.0
    yield from thin(_distinct(ordered, math.prod(axis.size for axis in nest.axes)), effort, share)


def _distinct(configurations: Iterable[Config], elements: int) -> Iterator[Config]:
    """Yield one of those that share the work in the same way: any grain above all elements keeps to one thread."""
    seen: set[Config] = set()
    for config in configurations:
        shared = tuple((name, min(int(value), elements) if name == "grain" else value) for name, value in config)
        if shared not in seen:
            seen.add(shared)
            yield config


def _steps(config: Config, start: Config) -> int:
    """Count the notches between two configurations."""
    ladders: tuple[tuple[int | str, ...], ...] = ((1, 2, 4), ("none", "costly", "all"), _GRAINS)
    distance = 0
    for ladder, (_, here), (_, there) in zip(ladders, config, start, strict=False):
        distance += abs(ladder.index(here) - ladder.index(there))
    return distance


def build_nest(form: Form, config: Config, target: Target) -> Built | Rejected:
    """Print and compile one configuration.

    Raises:
        CompilerMissingError: There is no g++ on PATH.
    """
    nest = nest_for(form, target)
    if isinstance(nest, Rejected):
        return nest
    if not isinstance(target, CpuTarget):
        return Rejected("unsupported", "a CPU kernel")
    began = time.perf_counter()
    made = build_launch(_printed(nest, shape_of(config)), target)
    if isinstance(made, Rejected):
        return made
    launch, code = made
    return Built(Kernel((launch,), requires=nest.requires), code, build_s=time.perf_counter() - began)
