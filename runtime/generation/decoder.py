"""One token for every row: the decode program, the choice of tokens and the advance of the rows as one unit of work.

On CUDA the unit is one graph per number of rows, context length to choose kernels by, and kind of sampling. It reads
and writes the rows' state where it lies, so replaying it is all that a step costs the host.
"""

from collections import OrderedDict
from typing import Final, NamedTuple

import torch
from torch import Tensor

from tune_model.runtime.execution.executor import Executor
from tune_model.runtime.execution.graphs import CapturedGraph, GraphPool
from tune_model.runtime.generation.rows import Rows
from tune_model.runtime.generation.sampling import LIKELIEST, Needs, pick
from tune_model.runtime.program import Program

__all__ = ["Decoder", "StepKind", "context_hint"]

_GRAPHS_AT_MOST: Final = 256
"""More than the numbers of rows, contexts and kinds of sampling make in any grid so far."""


class StepKind(NamedTuple):
    """What a step's work depends on besides the rows' state.

    Attributes:
        rows: The first so many take part.
        context: To choose kernels by.
        needs: Of the sampling.
    """

    rows: int
    context: int
    needs: Needs


def context_hint(program: Program, length: int) -> dict[str, int]:
    """Return the hint that tells a decode program how long its contexts are, within its bounds."""
    for symbol in program.symbols:
        if symbol.name == "context" and symbol.input is None:
            return {"context": min(max(length, symbol.minimum), symbol.maximum)}
    return {}


class Decoder:
    """Runs steps over the rows of one cache; not for several threads at once.

    Args:
        executor: Of the decode program.
        rows: The state that steps read and advance.
        pool: Where graphs are captured; `None` runs every step as a plain sequence of launches.
        at_most: Graphs that are kept; the one that was not used for longest goes first.
    """

    def __init__(
        self, executor: Executor, rows: Rows, pool: GraphPool | None, *, at_most: int = _GRAPHS_AT_MOST
    ) -> None:
        self._executor = executor
        self._rows = rows
        self._pool = pool
        self._epoch = executor.epoch
        self._at_most = at_most
        self._graphs: OrderedDict[StepKind, CapturedGraph] = OrderedDict()

    @property
    def graphs(self) -> int:
        """How many are captured."""
        return len(self._graphs)

    def step(self, kind: StepKind) -> Tensor:
        """Run one step.

        Returns:
            (rows, 1): each row's new token, in the rows' own memory: valid until the next step.
        """
        if self._pool is None or torch.cuda.is_current_stream_capturing():
            self._step(kind)
        else:
            with self._pool.lock, torch.cuda.device(self._rows.device):
                self._replay(kind, self._pool)
        return self._rows.first(kind.rows).tokens

    def is_ready(self, kind: StepKind) -> bool:
        """Whether a step of this kind starts at once: it needs no graph, or has one."""
        return self._pool is None or (self._epoch == self._executor.epoch and self._ready(kind) is not None)

    def _ready(self, kind: StepKind) -> StepKind | None:
        """Return the kind of a graph that does a step of this kind, and maybe more of the sampling than it needs."""
        if kind in self._graphs:
            return kind
        for known in self._graphs:  # at every step twice where the exact one is missing: cheap tests first
            if (known.rows, known.context) == (kind.rows, kind.context) and all(
                has or not asked for has, asked in zip(known.needs, kind.needs, strict=True)
            ):
                return known
        return None

    def capture(self, kind: StepKind) -> None:
        """Make a step's graph now instead of at its first use; its rows must rest."""
        if self._pool is not None:
            with self._pool.lock, torch.cuda.device(self._rows.device):
                self._forget_the_old()
                self._graph(kind, self._pool)

    def _replay(self, kind: StepKind, pool: GraphPool) -> None:
        self._forget_the_old()
        graph = self._graph(self._ready(kind) or kind, pool)
        stream = torch.cuda.current_stream(self._rows.device)
        pool.wait(stream)
        graph.replay()
        pool.done(stream)

    def _forget_the_old(self) -> None:
        if self._epoch != self._executor.epoch:  # weights lie elsewhere now
            torch.cuda.synchronize(self._rows.device)
            self._graphs.clear()
            self._epoch = self._executor.epoch

    def _graph(self, kind: StepKind, pool: GraphPool) -> CapturedGraph:
        graph = self._graphs.get(kind)
        if graph is None:
            # Choosing tokens without keeping them may be repeated: the cache slots are written with the same values.
            graph, _ = pool.capture(lambda: self._step(kind), lambda: self._choose(kind))
            self._graphs[kind] = graph
            if len(self._graphs) > self._at_most:
                torch.cuda.synchronize(self._rows.device)
                self._graphs.popitem(last=False)
        self._graphs.move_to_end(kind)
        return graph

    def _choose(self, kind: StepKind) -> Tensor:
        views = self._rows.first(kind.rows)
        outputs = self._executor.run(views.inputs, context_hint(self._executor.program, kind.context))
        logits = next(iter(outputs.values()))[:, -1]
        places = views.positions + 1 if kind.needs.draws else views.positions  # of the new tokens; else nobody asks
        return pick(logits, self._rows.sampling, 0, places, kind.needs, outputs.get(LIKELIEST))

    def _step(self, kind: StepKind) -> None:
        views = self._rows.first(kind.rows)
        tokens = self._choose(kind)
        if kind.needs.penalises:
            self._rows.sampling.note(0, tokens)
        views.tokens.copy_(tokens)
        views.positions.add_(views.moving)
