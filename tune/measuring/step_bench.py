"""Whole programs on a device, in messages: times of several sets of kernels for one program at one point, interleaved.

The child's side makes weights of random numbers once, and for every set of kernels an executor, on a GPU with its
graph; the parent's side is a process that may die. What is compared, and what follows, is in `tune/search`.
"""

import gc
import math
import random
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from multiprocessing.connection import Connection
from typing import Any, Final, Protocol

import msgspec
import torch
from torch import Tensor

from tune_model.runtime.execution.executor import Executor
from tune_model.runtime.execution.graphs import GraphPool, GraphRunner
from tune_model.runtime.execution.invoke import torch_dtype
from tune_model.runtime.execution.layout import layout_of
from tune_model.runtime.expression import evaluate
from tune_model.runtime.program import Constant, Input, Program, Transpose, Weight
from tune_model.runtime.replay import Entry, Replay
from tune_model.runtime.weights.transforms import pack_weight, weight_packing
from tune_model.tune.candidate import Rejected
from tune_model.tune.device import Samples
from tune_model.tune.measuring.cpu_stopwatch import CpuCalls, CpuStopwatch
from tune_model.tune.measuring.interval import drifted
from tune_model.tune.measuring.nvml import Nvml
from tune_model.tune.measuring.policy import Rung
from tune_model.tune.processes.answers import ANSWER_AT_MOST, Answer, AnswerError, decode_answer, encode_answer
from tune_model.tune.processes.child import Child
from tune_model.tune.target import CpuTarget, Target

__all__ = ["StepBench", "StepTimer", "StepWorker", "Variant", "Work"]

_LIMIT_S: Final = 300.0
"""Weights of a large model, two plans and graphs, the rounds."""

_SPIN_CYCLES: Final = 1_000_000
"""Of a GPU's clock, about half a millisecond: it spins while the host launches a graph, so that a step's time
begins with the step."""

_ROUNDS_S: Final = 0.6
_FEWEST, _MOST = 9, 41

_SAMPLE_US: Final = 1000.0
"""On a CPU the fastest of a few runs counts, unless one takes long (`cpu_stopwatch`)."""


class Variant(msgspec.Struct, frozen=True):
    """A program and the kernels that run it.

    Attributes:
        program: With the weights in the layouts that the kernels want.
        entries: By form.
        code: Machine code by SHA-256.
    """

    program: Program
    entries: dict[str, tuple[Entry, ...]]
    code: dict[str, bytes]


class Work(msgspec.Struct, frozen=True):
    """What is compared.

    Attributes:
        point: Value of every symbol.
        variants: Of one program.
        seed: Of the inputs and the order.
    """

    point: dict[str, int]
    variants: tuple[Variant, ...]
    seed: int


class StepTimer(Protocol):
    """Times whole programs."""

    def compare(self, work: Work) -> tuple[Samples, ...] | Rejected:
        """Time the variants in interleaved rounds: sample `i` of each is a pair, in microseconds per run.

        What disturbed them is marked as in `Device.compare`.
        """
        ...

    def close(self) -> None:
        """Give the device back."""
        ...


class StepBench:
    """Whole programs in this process."""

    def __init__(self, target: Target, index: int = 0) -> None:
        """Take the device."""
        if isinstance(target, CpuTarget):
            self._device = torch.device("cpu")
            torch.set_num_threads(target.threads)
        else:
            self._device = torch.device("cuda", index)
            torch.empty(1, device=self._device)
        self._weights: dict[tuple[object, ...], Tensor] = {}
        self._stopwatch = CpuStopwatch()

    def compare(self, work: Work) -> tuple[Samples, ...] | Rejected:
        """See `StepTimer.compare`."""
        try:
            with torch.no_grad(), self._current():
                return self._compare(work)
        except torch.OutOfMemoryError as error:
            return Rejected("out of memory", str(error).splitlines()[0])
        finally:
            self._give_back()

    def close(self) -> None:
        """Free the weights."""
        self._weights.clear()

    def _current(self) -> AbstractContextManager[object]:
        """Return the context in which streams and events are this device's."""
        return torch.cuda.device(self._device) if self._device.type == "cuda" else nullcontext()

    def _give_back(self) -> None:
        """Free caches and graphs now: the next step's may not fit beside them, nor what another process needs."""
        if self._device.type == "cuda":
            gc.collect()
            torch.cuda.empty_cache()

    def _compare(self, work: Work) -> tuple[Samples, ...]:
        generator = torch.Generator(self._device).manual_seed(work.seed)
        inputs = {i.name: self._input(i, work.point, generator) for i in work.variants[0].program.inputs}
        runs = [self._run(variant, work.point, inputs) for variant in work.variants]
        for run in (*runs, *runs):
            run()
        return self._on_cpu(runs, work.seed) if self._device.type == "cpu" else self._on_gpu(runs, work.seed)

    def _on_cpu(self, runs: Sequence[Callable[[], object]], seed: int) -> tuple[Samples, ...]:
        """Take rounds as a race's final does: those in which other processes were in the way are left out."""
        calls = [CpuCalls(lambda _set, run=run: run(), 1) for run in runs]  # type: ignore[misc]
        round_us = max(sum(one.estimate_us for one in calls), 1.0)
        least = max(1, min(_FEWEST, math.floor(_LIMIT_S / 6 * 1e6 / round_us)))
        rung = Rung(_SAMPLE_US, _MOST, least, _ROUNDS_S * 1e6)
        return tuple(self._stopwatch.compare(calls, rung, seed))

    def _on_gpu(self, runs: Sequence[Callable[[], object]], seed: int) -> tuple[Samples, ...]:
        started = time.perf_counter()
        brief = [self._once(run) for run in runs]
        rounds = max(_FEWEST, min(_MOST, math.floor(_ROUNDS_S * 1e6 / max(sum(brief), 1.0))))
        times: list[list[float]] = [[] for _ in runs]
        order = list(range(len(runs)))
        shuffle = random.Random(seed)  # noqa: S311 - an order of measurements, not a secret
        nvml = Nvml(str(torch.cuda.get_device_properties(self._device).uuid))
        errors = nvml.ecc_events()
        for _ in range(rounds):
            shuffle.shuffle(order)
            for place in order:
                times[place].append(self._once(runs[place]))
            if time.perf_counter() - started > _LIMIT_S / 3:
                break
        disturbed = drifted(times[0]) or nvml.is_slowed() is True or nvml.ecc_events() != errors
        return tuple(Samples(tuple(us), disturbed) for us in times)

    def _once(self, run: Callable[[], object]) -> float:
        before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(_SPIN_CYCLES)
        before.record()
        run()
        after.record()
        after.synchronize()
        return float(before.elapsed_time(after)) * 1e3

    def _run(self, variant: Variant, point: Mapping[str, int], inputs: Mapping[str, Tensor]) -> Callable[[], object]:
        program = variant.program
        weights = {w.name: self._weight(w) for w in program.weights}
        constants = {c.key: self._constant(c) for c in program.constants}
        executor = Executor(program, weights, constants, Replay(variant.entries), variant.code, self._device)
        hints = {s.name: point[s.name] for s in program.symbols if s.input is None}
        if self._device.type == "cpu":
            return lambda: executor.run(inputs, hints)
        runner = GraphRunner(executor, GraphPool(self._device))
        return lambda: runner.run(inputs, hints, clone=False)

    def _weight(self, weight: Weight) -> Tensor:
        """Return random numbers in the weight's layout; made once."""
        key = (weight.sources, weight.type.dtype, tuple(str(t) for t in weight.transforms))
        made = self._weights.get(key)
        if made is None:
            layout = layout_of(weight.type)
            turned = sum(isinstance(t, Transpose) for t in weight.transforms) % 2 == 1
            shape = (*layout.shape[:-2], layout.shape[-1], layout.shape[-2]) if turned else layout.shape
            made = torch.empty(shape, dtype=layout.dtype, device=self._device)
            if layout.dtype.is_floating_point or layout.dtype.is_complex:
                made.normal_(0.0, 1.0 if made.dim() < 2 else made.shape[-1] ** -0.5)
            else:
                made.zero_()
            made = made.transpose(-1, -2) if turned else made
            packing = weight_packing(weight)
            made = self._weights[key] = made if packing is None else pack_weight(made, packing)
        return made

    def _constant(self, constant: Constant) -> Tensor:
        """Return numbers that are legal as whatever they are: an index of 0 is always inside."""
        layout = layout_of(constant.type)
        return torch.zeros(layout.shape, dtype=layout.dtype, device=self._device)

    def _input(self, item: Input, point: Mapping[str, int], generator: torch.Generator) -> Tensor:
        shape = tuple(evaluate(size, point) for size in item.type.shape)
        dtype = torch_dtype(item.type.dtype)
        if dtype.is_floating_point or dtype.is_complex:  # caches too, which take most of the memory
            return torch.empty(shape, dtype=dtype, device=self._device).normal_(generator=generator)
        if item.values is None:
            return torch.ones(shape, dtype=dtype, device=self._device)
        low, high = evaluate(item.values.low, point), evaluate(item.values.high, point)
        if shape and high - low + 1 == shape[-1]:  # positions: each once
            return torch.arange(low, high + 1, device=self._device).to(dtype).expand(shape).contiguous()
        numbers = torch.randint(low, high + 1, shape, device=self._device, generator=generator)
        return numbers.to(dtype)


class StepWorker:
    """Whole programs in a process of its own, which is replaced when it dies or hangs.

    Attributes:
        seconds_left: Says how long a wait may still be because the whole run has to end.
    """

    def __init__(self, target: Target, index: int = 0, limit_s: float = _LIMIT_S) -> None:
        """Prepare; the process starts with the first comparison."""
        self._arguments = (target, index)
        self.seconds_left: Callable[[], float] = lambda: math.inf
        self._limit_s = limit_s
        self._child: Child | None = None

    def compare(self, work: Work) -> tuple[Samples, ...] | Rejected:
        """See `StepTimer.compare`."""
        if self._child is None:
            self._child = Child(_serve, self._arguments, "step")
        child = self._child
        try:
            child.connection.send(work)
            over = child.wait(self._limit_s, self.seconds_left)
            if over:
                self.close()
                return Rejected(over, f"whole programs took longer than {self._limit_s:g} s, or the run has to end")
            found: Any = decode_answer(child.connection.recv_bytes(ANSWER_AT_MOST)).found
        except (AnswerError, EOFError, OSError):
            ending = child.post_mortem()
            self.close()
            return Rejected("crash", f"the process {ending}")
        if isinstance(found, Rejected):
            self.close()
            return found
        samples: Sequence[object] = found if isinstance(found, tuple) else ()
        if len(samples) != len(work.variants) or not all(isinstance(s, Samples) and s.us for s in samples):
            return Rejected("crash", "the process answered with garbage")
        return tuple(s for s in samples if isinstance(s, Samples))

    def close(self) -> None:
        """End the process."""
        if self._child is not None:
            self._child.kill()
            self._child = None


def _serve(connection: Connection, target: Target, index: int) -> None:
    """Answer until the connection closes (in the child)."""
    bench = StepBench(target, index)
    while True:
        work: Work = connection.recv()
        connection.send_bytes(encode_answer(Answer(bench.compare(work))))
