"""The programs of a causal language model and what runs them. Types only."""

from collections.abc import Callable, Mapping
from typing import NamedTuple

from torch import Tensor

from tune_model.runtime.execution.executor import Executor
from tune_model.runtime.execution.graphs import GraphPool
from tune_model.runtime.generation.buckets import Grid
from tune_model.runtime.program import Program

__all__ = ["Phase", "Phases", "RunProgram"]

RunProgram = Callable[[Mapping[str, Tensor], Mapping[str, int]], dict[str, Tensor]]
"""Runs a program on inputs and hints: an executor or a graph runner."""


class Phase(NamedTuple):
    """A program and what runs it."""

    program: Program
    run: RunProgram


class Phases(NamedTuple):
    """Everything generation needs of a model.

    Attributes:
        prefill: Runs a prompt, or its first part.
        continuation: Runs a later part; `None` where prompts cannot be split.
        decode: Of the decode program.
        grids: What was tuned, by program; may be empty.
        pool: For the graphs of decode steps; `None` for none.
    """

    prefill: Phase
    continuation: Phase | None
    decode: Executor
    grids: Mapping[str, Grid]
    pool: GraphPool | None
