"""Run a program: check inputs, bind its symbols, keep a plan per set of sizes."""

import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from tune_model.runtime.coverage import Coverage
from tune_model.runtime.errors import TuneModelError
from tune_model.runtime.execution.autograd import without_autograd
from tune_model.runtime.execution.dispatch import Dispatcher, weight_layout
from tune_model.runtime.execution.invoke import ProgramError, torch_dtype
from tune_model.runtime.execution.layout import conforms, copy_as, layout_of
from tune_model.runtime.execution.plan import Plan
from tune_model.runtime.execution.planning import Held, build_plan
from tune_model.runtime.expression import evaluate
from tune_model.runtime.launch.cuda_driver import activate
from tune_model.runtime.launch.machine_code import CodeLoader, device_index
from tune_model.runtime.program import Constant, Input, Program, Symbol, Weight
from tune_model.runtime.replay import Replay

__all__ = ["Executor", "InputError"]

_PLANS_AT_MOST = 128
"""Plans kept per program; one holds closures and, for a few kernels, counters of some kilobytes for each stream."""


_ALIGNMENT_SEEN = 256
"""Greatest alignment of a cache that is told apart, in bytes; no kernel asks for more."""


class InputError(TuneModelError):
    """A call's inputs do not fit the program: a missing or unknown name, a wrong dtype, rank, size or device."""


def _hold_weight(weight: Weight, weights: Mapping[str, Tensor], device: torch.device) -> Held:
    tensor = weights.get(weight.name)
    if tensor is None:
        raise ProgramError(f"weight {weight.name!r} (from {', '.join(weight.sources)}) is not bound")
    kept_as = weight_layout(weight)
    if kept_as is not None and kept_as != "transposed":
        return Held(tensor, None, kept_as)
    layout = layout_of(weight.type)
    if tuple(tensor.shape) != layout.shape or tensor.dtype != layout.dtype:
        seen = f"{tensor.dtype} {tuple(tensor.shape)}"
        raise ProgramError(f"weight {weight.name!r} is {seen}; expected {layout.dtype} {layout.shape}")
    tensor = tensor.detach().to(device)
    if kept_as is not None:
        return Held(tensor, None, kept_as)
    if not conforms(tensor, layout):
        tensor = copy_as(tensor, layout)
    return Held(tensor, layout)


def _hold_constant(constant: Constant, constants: Mapping[str, Tensor], device: torch.device) -> Held:
    tensor = constants.get(constant.key)
    layout = layout_of(constant.type)
    if tensor is None:
        raise ProgramError(f"constant {constant.key!r} is missing")
    if tuple(tensor.shape) != layout.shape or tensor.dtype != layout.dtype:
        seen = f"{tensor.dtype} {tuple(tensor.shape)}"
        raise ProgramError(f"constant {constant.key!r} is {seen}; expected {layout.dtype} {layout.shape}")
    tensor = tensor.detach().to(device)
    if not conforms(tensor, layout):
        tensor = copy_as(tensor, layout)
    return Held(tensor, layout)


class _Signature:
    """A program's inputs and symbols, ready to check a call against."""

    def __init__(self, program: Program, device: torch.device) -> None:
        self.inputs: tuple[Input, ...] = program.inputs
        self.symbols: tuple[Symbol, ...] = program.symbols
        self.dtypes = tuple(torch_dtype(item.type.dtype) for item in program.inputs)
        self.position = {item.name: i for i, item in enumerate(program.inputs)}
        self.program = program.name
        self.device = device
        for symbol in program.symbols:
            if symbol.input is not None and symbol.input not in self.position:
                raise ProgramError(f"symbol {symbol.name!r} is bound by input {symbol.input!r}, which does not exist")

    def collect(self, inputs: Mapping[str, Tensor]) -> list[Tensor]:
        """Put a call's inputs in order, on names, types, ranks and devices alone."""
        try:
            tensors = [inputs[item.name] for item in self.inputs]
        except KeyError:
            tensors = []
        if len(inputs) != len(self.inputs) or len(tensors) != len(self.inputs):
            missing = [name for name in self.position if name not in inputs]
            unknown = [name for name in inputs if name not in self.position]
            raise InputError(
                f"program {self.program!r} takes {list(self.position)}; missing: {missing}, unknown: {unknown}"
            )
        for item, dtype, tensor in zip(self.inputs, self.dtypes, tensors, strict=True):
            if not isinstance(tensor, Tensor):
                raise InputError(f"input {item.name!r} is a {type(tensor).__name__}; expected a tensor")
            if tensor.dtype != dtype or tensor.dim() != len(item.type.shape):
                expected = f"{item.type.dtype} of {len(item.type.shape)} dims {list(item.type.shape)}"
                raise InputError(
                    f"input {item.name!r} is {tensor.dtype} with shape {tuple(tensor.shape)}; expected {expected}"
                )
            if tensor.device != self.device:
                raise InputError(f"input {item.name!r} is on {tensor.device}; expected {self.device}")
        # Kernels read memory, which a lazy negation or conjugation (the imaginary part of `x.conj()`) has not reached.
        return [t.resolve_conj().resolve_neg() if t.is_neg() or t.is_conj() else t for t in tensors]

    def bind(self, tensors: Sequence[Tensor], hints: Mapping[str, int]) -> dict[str, int]:
        """Read the symbols off the inputs' sizes and check every size."""
        values: dict[str, int] = {}
        for symbol in self.symbols:
            if symbol.input is not None:
                value = tensors[self.position[symbol.input]].shape[symbol.axis]
                origin = f"input {symbol.input!r} has size {value} in dim {symbol.axis}"
            else:
                value = hints.get(symbol.name, symbol.minimum if symbol.default is None else symbol.default)
                origin = f"hint {symbol.name!r} is {value}"
            if not symbol.minimum <= value <= symbol.maximum:
                raise InputError(f"{origin}; expected {symbol.name} from {symbol.minimum} to {symbol.maximum}")
            values[symbol.name] = value
        unknown = [name for name in hints if name not in values]
        if unknown:
            raise InputError(f"program {self.program!r} has no symbol {unknown[0]!r}; it has {sorted(values)}")
        for item, tensor in zip(self.inputs, tensors, strict=True):
            expected = tuple(evaluate(s, values) for s in item.type.shape)
            if tuple(tensor.shape) != expected:
                raise InputError(
                    f"input {item.name!r} has shape {tuple(tensor.shape)}; expected {expected} "
                    f"({list(item.type.shape)} with {values})"
                )
        return values


class Executor:
    """Runs one program; safe to use from several threads.

    Args:
        program: What to run.
        weights: By the names of the program's weights, after their transforms (see `bind_weights`).
        constants: By key.
        replay: What was tuned; with an empty table every form runs as its own ATen sequence.
        code: Machine code by SHA-256, or what loads it.
        device: Where everything lies.
        strict: Raise `NotTunedError` where no legal kernel is tuned, instead of running the form's own operators.
        coverage: Counters to add to; by default the executor has its own.

    Attributes:
        epoch: Moves on when weights lie elsewhere; what was captured before is of no use then.
    """

    def __init__(  # noqa: PLR0913, PLR0917 (everything a program needs, once)
        self,
        program: Program,
        weights: Mapping[str, Tensor],
        constants: Mapping[str, Tensor],
        replay: Replay,
        code: Mapping[str, bytes] | CodeLoader,
        device: torch.device | str,
        strict: bool = False,
        coverage: Coverage | None = None,
    ) -> None:
        self.program = program
        self.device = _indexed(torch.device(device))
        self.coverage = coverage or Coverage()
        self._signature = _Signature(program, self.device)
        self._held = {w.name: _hold_weight(w, weights, self.device) for w in program.weights}
        self._held |= {c.name: _hold_constant(c, constants, self.device) for c in program.constants}
        loader = code if isinstance(code, CodeLoader) else CodeLoader(code)
        self._dispatcher = Dispatcher(program.forms, replay, loader, self.device, strict=strict)
        self._names = tuple(output.name for output in program.outputs)
        self._caches = tuple(i for i, item in enumerate(program.inputs) if item.role == "cache")
        self._lock = threading.RLock()
        self._plans: OrderedDict[tuple[object, ...], Plan] = OrderedDict()
        self.epoch = 0

    def rebind(self, weights: Mapping[str, Tensor]) -> None:
        """Take other tensors for some weights; plans are built again, and `epoch` moves on.

        Args:
            weights: By name; those of other programs are passed over.
        """
        with self._lock:
            changed = [w for w in self.program.weights if w.name in weights]
            if changed:
                self._held |= {w.name: _hold_weight(w, weights, self.device) for w in changed}
                while self._plans:
                    self.coverage.retire(self._plans.popitem()[1].tally)
                self._dispatcher.forget()
                self.epoch += 1

    def plan(self, tensors: Sequence[Tensor], hints: Mapping[str, int]) -> Plan:
        """Return the plan for inputs of these sizes and caches that start so, building it at their first use."""
        alignment = _ALIGNMENT_SEEN
        for i in self._caches:
            alignment |= tensors[i].data_ptr()
        alignment &= -alignment  # the greatest power of two that divides all
        key = (*[t.shape for t in tensors], alignment, *(sorted(hints.items()) if hints else ()))
        with self._lock:
            plan = self._plans.get(key)
            if plan is None:
                symbols = self._signature.bind(tensors, hints)
                plan = build_plan(self.program, symbols, self._held, self._dispatcher, self.device, alignment)
                self.coverage.add(plan.tally)
                self._plans[key] = plan
                if len(self._plans) > _PLANS_AT_MOST:
                    self.coverage.retire(self._plans.popitem(last=False)[1].tally)
                    self._dispatcher.forget()
            else:
                self._plans.move_to_end(key)
            plan.tally.runs += 1
        return plan

    def run(self, inputs: Mapping[str, Tensor], hints: Mapping[str, int] | None = None) -> dict[str, Tensor]:
        """Run the program once.

        Args:
            inputs: By name; cache inputs are written in place.
            hints: Values of symbols that no input binds, such as a decode step's `context`.

        Returns:
            Outputs by name. They may share memory with inputs or with each other where the program says so.

        Raises:
            InputError: The inputs do not fit.
            NotTunedError: Strict, and something is not tuned for these sizes.
        """
        tensors = self._signature.collect(inputs)
        if self.device.type == "cuda":
            with torch.cuda.device(self.device):
                activate(self.device)
                return self._run(tensors, hints or {})
        return self._run(tensors, hints or {})

    def _run(self, tensors: list[Tensor], hints: Mapping[str, int]) -> dict[str, Tensor]:
        with without_autograd():
            plan = self.plan(tensors, hints)
            return dict(zip(self._names, plan.run(self._conform(tensors, plan)), strict=True))

    def _conform(self, tensors: list[Tensor], plan: Plan) -> list[Tensor]:
        for i, contiguous in enumerate(plan.contiguous):
            tensor, layout = tensors[i], plan.inputs[i]
            if not (contiguous and tensor.is_contiguous()) and not conforms(tensor, layout):
                item = self.program.inputs[i]
                if item.role == "cache":
                    seen = f"cache input {item.name!r} has strides {tensor.stride()}"
                    raise InputError(f"{seen}; expected {layout.strides}: it is written in place")
                tensors[i] = copy_as(tensor, layout)
        return tensors


def _indexed(device: torch.device) -> torch.device:
    """Name a CUDA device by its number, as tensors do."""
    return torch.device("cuda", device_index(device)) if device.type == "cuda" else device
