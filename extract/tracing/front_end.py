"""What tracing gives: a raw program, the values of its constants and how it was obtained. Types only."""

from typing import NamedTuple

import torch

from tune_model.runtime.errors import TuneModelError
from tune_model.runtime.program import Program

__all__ = ["GridError", "SourceError", "Trace", "TraceError", "UnknownAttentionError"]


class SourceError(TuneModelError):
    """The model source cannot be used: missing files, unknown type, refused fields, a factory that fails."""


class TraceError(TuneModelError):
    """The model was built but cannot be turned into a program that is right for every declared size."""


class GridError(TraceError):
    """The workload's grid asks for sizes that the model does not run at."""


class UnknownAttentionError(TraceError):
    """A model does not run its attention through the implementation it was built with."""


class Trace(NamedTuple):
    """One phase of a model.

    Attributes:
        program: Raw when it comes from a front end: every step is a `Call`, nothing is rewritten.
        constants: Value of every `Constant.key` of the program, on the CPU.
        notes: Which rung of the tracing ladder was used and what was patched.
    """

    program: Program
    constants: dict[str, torch.Tensor]
    notes: tuple[str, ...] = ()
