"""Times ways to compute one form against each other in this process, after comparing each with float64.

The stopwatch is the tuner's: CUDA graphs of many calls, weights rotating over copies so that each call finds them cold,
rounds in random order. Inputs, graphs and process are new, so a figure here does not depend on the race that chose.
"""

import gc
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

import torch

from bench.plans import task_of
from tune_model.runtime.errors import TuneModelError
from tune_model.runtime.execution.binding import bind_kernel
from tune_model.runtime.kernel import Kernel
from tune_model.runtime.program import Form
from tune_model.tune.candidate import Built
from tune_model.tune.families import aten
from tune_model.tune.measuring.cpu_stopwatch import CpuStopwatch
from tune_model.tune.measuring.cuda_stopwatch import CudaStopwatch
from tune_model.tune.measuring.inputs import copies_for, make_inputs, make_outputs, poison
from tune_model.tune.measuring.interval import percentile
from tune_model.tune.measuring.policy import Rung
from tune_model.tune.measuring.reference import compare, expect, tolerance
from tune_model.tune.relayout import relaid_form, relay
from tune_model.tune.target import CudaTarget, Target

__all__ = ["Arena", "Contender", "Setting", "Timed", "WrongResultError", "extern", "kernel_contender"]

_ROTATE: Final = 3
"""Copies of the weights add up to this many times the last-level cache."""

_FEWEST, _MOST = 15, 61
_SAMPLE_US: Final = 1000.0

Run = Callable[[int], Sequence[torch.Tensor]]


class WrongResultError(TuneModelError):
    """A contender computes something else than the others."""


class Setting(NamedTuple):
    """What a contender is bound to.

    Attributes:
        form: Concrete.
        sets: Inputs: activations are shared, weights are copies.
        outputs: Where launches write their results.
        device: Where everything is.
    """

    form: Form
    sets: Sequence[tuple[torch.Tensor, ...]]
    outputs: Sequence[torch.Tensor]
    device: torch.device


class Contender(NamedTuple):
    """One way to compute a form.

    Attributes:
        name: Unique among those that meet.
        bind: Returns what computes the form once from the set of inputs with the given number.
    """

    name: str
    bind: Callable[[Setting], Run]


class Timed(NamedTuple):
    """A contender's times, one for each round, in microseconds per call; and its relative error."""

    us: tuple[float, ...]
    error: float
    disturbed: bool

    @property
    def median_us(self) -> float:
        """The median."""
        return percentile(self.us, 0.5)


def kernel_contender(name: str, kernel: Kernel, code: dict[str, bytes]) -> Contender:
    """Return a kernel of the tuner's as a contender; its weights are laid out as it wants them."""

    def bind(setting: Setting) -> Run:
        form, layouts = setting.form, kernel.layouts
        bound = bind_kernel(kernel, relaid_form(form, layouts), code, setting.device)
        sets = [relay(form, inputs, layouts) for inputs in setting.sets] if layouts else setting.sets
        return lambda number: bound(sets[number], setting.outputs)

    return Contender(name, bind)


def extern(form: Form, target: Target) -> Contender:
    """Return the form's own ATen sequence: cuBLAS, and one kernel for each operator after it."""
    built = aten.FAMILY.build(task_of(form), (), target)
    assert isinstance(built, Built)  # noqa: S101 (the baseline is always built)
    return kernel_contender("extern", built.kernel, {})


class Arena:
    """A device in this process.

    Attributes:
        device: Where it is.
        stopwatch: The tuner's.
    """

    def __init__(self, target: Target, index: int = 0) -> None:
        """Take the device."""
        self.target = target
        self.stopwatch: Any
        if isinstance(target, CudaTarget):
            self.device = torch.device("cuda", index)
            torch.cuda.init()
            self.stopwatch = CudaStopwatch(self.device, _SAMPLE_US)
            self._rotate_bytes = _ROTATE * target.l2_bytes
        else:
            self.device = torch.device("cpu")
            torch.set_num_threads(target.threads)
            self.stopwatch = CpuStopwatch()
            self._rotate_bytes = _ROTATE * (target.l3_bytes or target.l2_bytes * target.threads)

    def meet(
        self, form: Form, contenders: Sequence[Contender], *, seed: int, budget_s: float = 0.6
    ) -> dict[str, Timed]:
        """Check and time contenders, interleaved.

        Args:
            form: Concrete.
            contenders: The first sets the tolerance for the others: twice its error and one unit in the last place.
            seed: Of inputs and order; the tuner's are different.
            budget_s: Roughly how long rounds may take; at least 15 are run, at most 61.

        Raises:
            WrongResultError: A contender's result is not within the tolerance.
        """
        try:
            with torch.no_grad():
                return self._meet(form, contenders, seed, budget_s)
        finally:
            self.release()

    def release(self) -> None:
        """Free graphs and inputs of the last meeting."""
        self.stopwatch.reset()
        gc.collect()
        if self.device.type == "cuda":
            # The tuner's own process may need the memory next.
            torch.cuda.empty_cache()

    def _meet(self, form: Form, contenders: Sequence[Contender], seed: int, budget_s: float) -> dict[str, Timed]:
        with self.stopwatch.context():
            sets = make_inputs(form, self.device, seed, copies_for(form, self._rotate_bytes))
            setting = Setting(form, sets, make_outputs(form, self.device), self.device)
            runs = [contender.bind(setting) for contender in contenders]
        self.stopwatch.synchronize()
        errors = self._check(setting, contenders, runs)
        calls = [self.stopwatch.prepare(_without_result(run), len(sets)) for run in runs]
        round_us = sum(self._brief_us(c) for c in calls)
        rounds = max(_FEWEST, min(_MOST, int(budget_s * 1e6 / max(round_us, 1.0))))
        rung = Rung(_SAMPLE_US, rounds)
        samples = self.stopwatch.compare(calls, rung, seed)
        if any(found.disturbed for found in samples):
            samples = self.stopwatch.compare(calls, rung, seed + 1)
        return {
            contender.name: Timed(found.us, error, found.disturbed)
            for contender, found, error in zip(contenders, samples, errors, strict=True)
        }

    def _brief_us(self, calls: Any) -> float:
        """Return how long one sample takes; on a CPU a sample is as many calls as fit."""
        us: tuple[float, ...] = self.stopwatch.time(calls, Rung(_SAMPLE_US, 2)).us
        return max(us) * float(calls.calls) if self.device.type == "cuda" else max(*us, 2 * _SAMPLE_US)

    def _check(self, setting: Setting, contenders: Sequence[Contender], runs: Sequence[Run]) -> list[float]:
        """Compare one call of each with the reference; returns their errors."""
        with self.stopwatch.context():
            expected = expect(setting.form, setting.sets[0], self.device)
            errors: list[float] = []
            allowed: tuple[float, ...] = ()
            for contender, run in zip(contenders, runs, strict=True):
                for output, reference in zip(setting.outputs, expected.results, strict=True):
                    poison(output, reference)
                self.stopwatch.synchronize()
                results = list(run(0))
                self.stopwatch.synchronize()
                deviation = compare(results, setting.sets[0], expected)
                allowed = allowed or tolerance(setting.form, deviation)
                if not all(error <= limit for error, limit in zip(deviation.errors, allowed, strict=True)):
                    msg = f"{contender.name} has a relative error of {deviation.worst:.3g}; allowed {max(allowed):.3g}"
                    raise WrongResultError(msg)
                errors.append(deviation.worst)
        return errors


def _without_result(run: Run) -> Callable[[int], None]:
    def call(number: int) -> None:
        run(number)

    return call
