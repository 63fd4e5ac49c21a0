"""A device in this process: makes a task's inputs and reference, loads candidates, checks and times them.

Used inside the worker process that owns a GPU or the CPU's threads, and directly in tests. A fault of a candidate that
Python can see becomes `Rejected`; what Python cannot see (a crash, a hang) is the worker's parent's business.
"""

import logging
import math
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from tune_model.extract.task import NumericRules
from tune_model.runtime.execution.autograd import without_autograd
from tune_model.runtime.execution.binding import BoundKernel, bind_kernel
from tune_model.runtime.program import Form
from tune_model.runtime.replay import slot_sizes, unmet
from tune_model.tune.candidate import Built, Candidate, Rejected
from tune_model.tune.device import Bench, Passed, Samples
from tune_model.tune.measuring.cpu_stopwatch import CpuStopwatch
from tune_model.tune.measuring.cuda_stopwatch import CudaStopwatch
from tune_model.tune.measuring.fence import Fences, StrayWriteError, digest
from tune_model.tune.measuring.inputs import copies_for, copy_layout, make_inputs, make_outputs, poison
from tune_model.tune.measuring.policy import Rung
from tune_model.tune.measuring.reference import Deviation, Expected, compare, expect, tolerance
from tune_model.tune.relayout import relaid_form, relay
from tune_model.tune.target import CudaTarget, Target

__all__ = ["Workbench"]

logger = logging.getLogger(__name__)

T = TypeVar("T")

InputSet = tuple[torch.Tensor, ...]
Layouts = tuple[tuple[str, str], ...]


class _Contender:
    """A loaded candidate: its kernel, the inputs it takes, and its captured calls once it is timed."""

    def __init__(self, bound: BoundKernel, sets: list[InputSet], layouts: Layouts) -> None:
        self.bound = bound
        self.sets = sets
        self.layouts = layouts
        self.calls: Any = None


class _Open:
    """An open task: its inputs in every layout asked for, and results between fences."""

    def __init__(self, bench: Bench, sets: list[InputSet], device: torch.device) -> None:
        self.bench = bench
        self.sets: dict[Layouts, list[InputSet]] = {(): sets}
        self.digests: dict[Layouts, tuple[int | None, ...]] = {}
        self.fences = Fences()
        self.outputs = make_outputs(bench.task.form, device, self.fences.allocate)
        self.fences.close(self.outputs)
        self.expected: Expected
        self.tolerance: tuple[float, ...] = ()
        self.contenders: dict[Candidate, _Contender] = {}

    @property
    def form(self) -> Form:
        return self.bench.task.form

    def check_results(self) -> None:
        """Raise `StrayWriteError` if something around the results was written."""
        self.fences.check([result.name for result in self.form.results])

    def note_inputs(self, layouts: Layouts) -> None:
        """Remember what the inputs of a layout are, unless that was done before."""
        if layouts not in self.digests:
            self.digests[layouts] = self._digests(layouts)

    def check_inputs(self, layouts: Layouts) -> None:
        """Raise `StrayWriteError` if an input was written."""
        found = self._digests(layouts)
        for parameter, now, before in zip(self.form.parameters, found, self.digests[layouts], strict=True):
            if now != before:
                raise StrayWriteError(f"changed its input {parameter.name}")

    def _digests(self, layouts: Layouts) -> tuple[int | None, ...]:
        """Digest the inputs of a layout; caches are written by every call that is timed."""
        pairs = zip(self.form.parameters, self.sets[layouts][0], strict=True)
        return tuple(None if parameter.role == "cache" else digest(value) for parameter, value in pairs)


class Workbench:
    """A `Device` in this process.

    Attributes:
        broken: The device answers no more (a CUDA fault poisons the whole process), or a candidate has written over
            memory that is not its own.
    """

    def __init__(self, target: Target, index: int = 0) -> None:
        """Take a device.

        Args:
            target: The CPU, whose `threads` are set for this process, or a GPU.
            index: Which GPU.
        """
        self.broken = False
        self.stopwatch: Any
        if isinstance(target, CudaTarget):
            self.device = torch.device("cuda", index)
            self.stopwatch = CudaStopwatch(self.device, 1000.0)
        else:
            self.device = torch.device("cpu")
            torch.set_num_threads(target.threads)
            self.stopwatch = CpuStopwatch()
        self._task: _Open | None = None

    def open(self, bench: Bench) -> Passed | Rejected:
        """See `Device.open`."""
        self.finish()
        _set_rules(bench.task.rules)
        return self._attempt(lambda: self._open(bench))

    def check(self, candidate: Candidate, built: Built) -> Passed | Rejected:
        """See `Device.check`."""
        return self._attempt(lambda: self._check(candidate, built))

    def time(self, candidate: Candidate, built: Built, rung: Rung) -> Samples | Rejected:
        """See `Device.time`."""

        def take() -> Samples:
            samples: Samples = self.stopwatch.time(self._ready(candidate, built).calls, rung)
            self._current().check_results()
            return samples

        return self._attempt(take)

    def compare(
        self, candidates: tuple[tuple[Candidate, Built], ...], rung: Rung
    ) -> tuple[Samples | Rejected, ...] | Rejected:
        """See `Device.compare`."""
        for number, (candidate, built) in enumerate(candidates):
            ready = self._attempt(lambda c=candidate, b=built: self._ready(c, b))  # type: ignore[misc]
            if isinstance(ready, Rejected):
                return tuple(ready if i == number else Samples(()) for i in range(len(candidates)))
        task = self._current()
        calls = [self._contender(candidate, built).calls for candidate, built in candidates]

        def take() -> list[Samples]:
            samples: list[Samples] = self.stopwatch.compare(calls, rung, task.bench.seed)
            task.check_results()
            return samples

        taken = self._attempt(take)
        if isinstance(taken, Rejected):
            return taken  # calls of all of them lie behind it
        # Right once is not right for good: a workspace left dirty or a race shows after many calls.
        still: list[Samples | Rejected] = list(taken)
        for place, pair in enumerate(candidates[1:], start=1):
            found = self._attempt(lambda p=pair: self._check(*p))  # type: ignore[misc]
            if isinstance(found, Rejected):
                still[place] = found
            if self.broken:
                break  # what the others compute now says nothing about them
        return tuple(still)

    def finish(self) -> None:
        """See `Device.finish`."""
        if self._task is None:
            return
        self._task = None
        self.stopwatch.reset()
        if self.device.type == "cuda" and not self.broken:
            free, total = torch.cuda.mem_get_info(self.device)
            if free < total // 2:
                torch.cuda.empty_cache()

    def close(self) -> None:
        """See `Device.close`."""
        self.finish()

    def _open(self, bench: Bench) -> Passed | Rejected:
        form = bench.task.form
        copies = copies_for(form, bench.policy.rotate_bytes)
        while True:
            # Fewer copies are a little warmer; no inputs at all is the end of the task.
            try:
                sets = make_inputs(form, self.device, bench.seed, copies)
                task = _Open(bench, sets, self.device)
                task.expected = expect(form, sets[0], self.device)
                break
            except (MemoryError, RuntimeError) as error:
                if copies == 1 or not _out_of_memory(error):
                    raise
                sets = []
                copies = max(1, copies // 4)
                logger.warning("no memory for %s; taking fewer copies of the inputs: %d", bench.task.form.kind, copies)
                if self.device.type == "cuda":
                    torch.cuda.empty_cache()
        self.stopwatch.synchronize()
        self._task = task
        deviation = self._deviation(self._bind(bench.baseline))
        if deviation.worst == float("inf"):
            return Rejected("wrong", f"the baseline does not reproduce its own reference: errors {deviation.errors}")
        task.tolerance = tolerance(form, deviation)
        return Passed(deviation.worst)

    def _check(self, candidate: Candidate, built: Built) -> Passed | Rejected:
        task = self._current()
        sizes = slot_sizes(relaid_form(task.form, built.kernel.layouts))
        for requirement in built.kernel.requires:
            problem = unmet(requirement, sizes, {})
            if problem is not None:
                return Rejected("unsupported", f"its own requirement does not hold for the task: {problem}")
        deviation = self._deviation(self._contender(candidate, built))
        names = [*(p.name for p in task.form.results), *(p.name for p in task.form.parameters if p.role == "cache")]
        for name, error, allowed in zip(names, deviation.errors, task.tolerance, strict=True):
            if not error <= allowed:
                return Rejected("wrong", f"{name} {_wrongness(error)}, allowed {allowed:.3g}")
        return Passed(deviation.worst)

    def _ready(self, candidate: Candidate, built: Built) -> _Contender:
        contender = self._contender(candidate, built)
        if contender.calls is None:
            outputs, bound, sets = self._current().outputs, contender.bound, contender.sets

            def run(number: int) -> None:
                bound(sets[number], outputs)

            contender.calls = self.stopwatch.prepare(run, len(sets))
        return contender

    def _contender(self, candidate: Candidate, built: Built) -> _Contender:
        contenders = self._current().contenders
        if candidate not in contenders:
            contenders[candidate] = self._bind(built)
        return contenders[candidate]

    def _bind(self, built: Built) -> _Contender:
        task = self._current()
        layouts = built.kernel.layouts
        if layouts not in task.sets:
            task.sets[layouts] = [relay(task.form, inputs, layouts) for inputs in task.sets[()]]
        bound = bind_kernel(built.kernel, relaid_form(task.form, layouts), built.code, self.device)
        return _Contender(bound, task.sets[layouts], layouts)

    def _deviation(self, contender: _Contender) -> Deviation:
        """Run once on copies of the caches and poisoned outputs, and compare; nothing else may have changed."""
        task = self._current()
        caches = Fences()
        # Caches are never re-laid out, so the copies may come from this contender's own set.
        inputs = tuple(
            copy_layout(value, caches.allocate) if parameter.role == "cache" else value
            for value, parameter in zip(contender.sets[0], task.form.parameters, strict=True)
        )
        for output, reference in zip(task.outputs, task.expected.results, strict=True):
            poison(output, reference)
        task.note_inputs(contender.layouts)
        self.stopwatch.synchronize()
        results = list(contender.bound(inputs, task.outputs))
        self.stopwatch.synchronize()
        task.check_results()
        caches.check([p.name for p in task.form.parameters if p.role == "cache"])
        task.check_inputs(contender.layouts)
        return compare(results, inputs, task.expected)

    def _attempt(self, action: Callable[[], T]) -> T | Rejected:
        """Run a piece of work; what it raises becomes a reason."""
        try:
            with self.stopwatch.context(), without_autograd():  # as the executor runs it
                return action()
        except StrayWriteError as error:
            self.broken = True  # what else was written over cannot be known
            return Rejected("stray write", str(error))
        except Exception as error:  # a candidate may raise anything; it costs the candidate only
            logger.debug("rejected", exc_info=True)
            rejected = _reason(error)
        self._probe()
        return rejected

    def _probe(self) -> None:
        if self.device.type != "cuda":
            return
        self.broken = self.broken or self.stopwatch.spoiled
        try:
            torch.cuda.synchronize(self.device)
        except RuntimeError:
            self.broken = True

    def _current(self) -> _Open:
        if self._task is None:
            raise RuntimeError("no task is open on this device")
        return self._task


def _wrongness(error: float) -> str:
    if math.isinf(error):
        return "holds NaN, infinity or values never written where numbers are expected (or the reverse): error inf"
    return f"has a relative error of {error:.3g}"


def _set_rules(rules: NumericRules) -> None:
    """Give torch the task's numeric rules: they bind the baseline too."""
    torch.backends.cuda.matmul.allow_tf32 = rules.allow_tf32
    torch.backends.cudnn.allow_tf32 = rules.allow_tf32


def _reason(error: Exception) -> Rejected:
    lines = str(error).strip().splitlines()
    detail = f"{type(error).__name__}: {lines[0] if lines else ''}"[:500]
    return Rejected("out of memory" if _out_of_memory(error) else "launch", detail)


def _out_of_memory(error: BaseException) -> bool:
    if isinstance(error, MemoryError | torch.cuda.OutOfMemoryError):
        return True
    return "can't allocate memory" in str(error) or "out of memory" in str(error)
