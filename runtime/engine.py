"""All programs of a model, ready to run on one device: executors, and on CUDA graphs of what repeats.

What a server calls is in `tuned`, and weights are bound there; here programs run on what they are given.
"""

import threading
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from types import MappingProxyType
from typing import NamedTuple

import torch
from torch import Tensor

from tune_model.runtime.coverage import Coverage, ModelIdentity
from tune_model.runtime.execution.dispatch import Dispatcher
from tune_model.runtime.execution.executor import Executor, InputError
from tune_model.runtime.execution.graphs import GraphPool, GraphRunner
from tune_model.runtime.execution.lookups import check_indices, index_limits
from tune_model.runtime.generation.buckets import Grid
from tune_model.runtime.generation.continuation import CONTINUATION, continuation_of
from tune_model.runtime.generation.phases import Phase, Phases, RunProgram
from tune_model.runtime.launch.machine_code import CodeLoader
from tune_model.runtime.operators.replay import OperatorReplay
from tune_model.runtime.program import Program
from tune_model.runtime.replay import Replay

__all__ = ["Engine", "ModelParts"]

_PROMPT_GRAPH_TOKENS = 512
"""Longer parts of prompts outlast their launches, and a graph would only hold memory."""

_PROMPT_GRAPHS_AT_MOST = 32
"""One per length and row of the cache."""


class ModelParts(NamedTuple):
    """What an artifact holds.

    Attributes:
        programs: One per phase.
        constants: By key.
        replay: What was tuned.
        code: Machine code by SHA-256.
        grids: Values of each program's symbols that were tuned, by program; where none are given, sizes are rounded by
            powers of two alone.
        model: Which model it is, for saved coverage; `None` where no artifact says.
    """

    programs: Sequence[Program]
    constants: Mapping[str, Tensor]
    replay: Replay
    code: Mapping[str, bytes]
    grids: Mapping[str, Grid] = MappingProxyType({})
    model: ModelIdentity | None = None


class Engine:
    """Runs a model's programs; safe to use from several threads.

    Args:
        parts: From an artifact, or straight from the tuner.
        weights: By the programs' names, after their transforms.
        loader: Of the parts' code.
        device: Where everything lies; a CUDA device by its number.
        graphs: Replay decode steps and repeated shapes as CUDA graphs; ignored on a CPU.
        strict: Raise where nothing legal is tuned instead of running plain operators.

    Attributes:
        programs: By name.
        coverage: Counters of what ran.
    """

    def __init__(
        self,
        parts: ModelParts,
        weights: Mapping[str, Tensor],
        loader: CodeLoader,
        device: torch.device,
        graphs: bool = True,
        strict: bool = False,
    ) -> None:
        self.programs: dict[str, Program] = {program.name: program for program in parts.programs}
        self.coverage = Coverage(parts.model)
        self._parts = parts
        self._weights = dict(weights)
        self._loader = loader
        self._device = device
        self._strict = strict
        self._executors = {name: self._executor(program) for name, program in self.programs.items()}
        self._pool = GraphPool(device) if graphs and device.type == "cuda" else None
        self._run = {name: self._runner(name, executor) for name, executor in self._executors.items()}
        self._limits = {name: index_limits(program) for name, program in self.programs.items()}
        self._continuation: Executor | None = None
        self._language = self._language_phases()
        self._operators: OperatorReplay | None = None
        self._made_late = threading.Lock()

    def executor(self, phase: str) -> Executor:
        """Return what runs one program without graphs.

        Raises:
            InputError: There is no such program.
        """
        executor = self._executors.get(phase)
        if executor is None:
            raise self._no_program(phase)
        return executor

    def run(self, phase: str, inputs: Mapping[str, Tensor], hints: Mapping[str, int]) -> dict[str, Tensor]:
        """Run one program; see `TunedModel.run`.

        Raises:
            InputError: There is no such program, or the inputs do not fit it.
        """
        run = self._run.get(phase)
        if run is None:
            raise self._no_program(phase)
        self.check(phase, inputs)
        return run(inputs, hints)

    def check(self, phase: str, inputs: Mapping[str, object]) -> None:
        """Check what a program looks up in a table or a cache, as far as that lies on the host.

        Raises:
            InputError: Something is outside.
        """
        check_indices(inputs, self._limits.get(phase, {}))

    def language(self) -> Phases:
        """Return what generation needs.

        Raises:
            InputError: The model does not generate.
        """
        if self._language is None:
            raise InputError(f"the model has programs {list(self.programs)}; generation needs prefill and decode")
        return self._language

    def operators(self) -> AbstractContextManager[None]:
        """Return a context in which this thread's torch calls run on tuned kernels; see `TunedModel.operators`."""
        with self._made_late:
            if self._operators is None:
                forms = {key: form for program in self.programs.values() for key, form in program.forms.items()}
                dispatcher = Dispatcher(forms, self._parts.replay, self._loader, self._device, strict=False)
                self._operators = OperatorReplay(tuple(self.programs.values()), dispatcher, self._device, self.coverage)
            return self._operators.active()

    def rebind(self, weights: Mapping[str, Tensor], replaced: frozenset[str]) -> None:
        """Take all weights again, of which those named lie elsewhere now; nothing may run meanwhile."""
        self._weights = dict(weights)
        moved = {name: tensor for name, tensor in weights.items() if name in replaced}
        for executor in (*self._executors.values(), self._continuation):
            if executor is not None:
                executor.rebind(moved)

    def _no_program(self, phase: str) -> InputError:
        return InputError(f"the model has no program {phase!r}; it has {list(self.programs)}")

    def _executor(self, program: Program) -> Executor:
        parts = self._parts
        return Executor(
            program,
            self._weights,
            parts.constants,
            parts.replay,
            self._loader,
            self._device,
            self._strict,
            coverage=self.coverage,
        )

    def _runner(self, name: str, executor: Executor) -> RunProgram:
        """Return what runs a program: on CUDA, graphs of the sizes that repeat."""
        if self._pool is None:
            return executor.run
        if name not in {"prefill", CONTINUATION}:
            return GraphRunner(executor, self._pool, eager_runs=0 if name == "decode" else 1).run
        runner = GraphRunner(executor, self._pool, eager_runs=1, at_most=_PROMPT_GRAPHS_AT_MOST)

        def run(inputs: Mapping[str, Tensor], hints: Mapping[str, int]) -> dict[str, Tensor]:
            ids = inputs.get("input_ids")
            short = isinstance(ids, Tensor) and ids.numel() <= _PROMPT_GRAPH_TOKENS
            return runner.run(inputs, hints) if short else executor.run(inputs, hints)

        return run

    def _language_phases(self) -> Phases | None:
        if not {"prefill", "decode"} <= set(self.programs):
            return None
        prefill = self.programs["prefill"]
        # Its attention is never tuned, so a strict model runs prompts whole.
        program = None if self._strict else continuation_of(prefill)
        continuation = None
        if program is not None:

            def run(inputs: Mapping[str, Tensor], hints: Mapping[str, int]) -> dict[str, Tensor]:
                return self._run_late(program)(inputs, hints)

            continuation = Phase(program, run)
        return Phases(
            prefill=Phase(prefill, self._run["prefill"]),
            continuation=continuation,
            decode=self._executors["decode"],
            grids=self._parts.grids,
            pool=self._pool,
        )

    def _run_late(self, program: Program) -> RunProgram:
        """Return what runs a program that few callers need, made at its first use; any thread may come first."""
        run = self._run.get(program.name)
        if run is None:
            with self._made_late:
                run = self._run.get(program.name)
                if run is None:
                    self._continuation = self._executor(program)
                    # Last: another thread that sees it runs at once.
                    run = self._run[program.name] = self._runner(program.name, self._continuation)
        return run
