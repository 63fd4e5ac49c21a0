"""Replay tuned kernels for single operators inside somebody else's code: see `calls` for which.

A torch function mode sees the calls. A call is answered when the artifact has a form that is just this operator, at
sizes and strides that fit, and a kernel that is legal for them; all others run as they would, and every outcome is
counted. Kernels launch on the current stream, so code that captures CUDA graphs of its own captures them too.
"""

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from tune_model.runtime.coverage import Coverage, CoverageRow, Outcome, Tally
from tune_model.runtime.execution.autograd import without_autograd
from tune_model.runtime.execution.binding import BoundKernel
from tune_model.runtime.execution.dispatch import Dispatcher, Site, form_label
from tune_model.runtime.execution.layout import same
from tune_model.runtime.expression import ExpressionError, evaluate
from tune_model.runtime.launch.cuda_driver import activate
from tune_model.runtime.operators.calls import DEFAULTS, READERS, Asked, Value
from tune_model.runtime.program import Arg, Call, Form, Items, Parameter, Program, Ref, bind_call
from tune_model.runtime.replay import contiguous_strides

__all__ = ["OperatorReplay"]

_PROGRAM = "operators"
_KNOWN_AT_MOST = 4096
"""Distinct calls that are remembered."""


class _Known(NamedTuple):
    """What a call runs.

    Attributes:
        kernel: `None` for the call itself.
        order: Place of each of the kernel's inputs among the call's tensors.
        tally: Counts it.
    """

    kernel: BoundKernel | None
    order: tuple[int, ...]
    tally: Tally


class _Fit(NamedTuple):
    """How a call is an instance of a form."""

    dims: tuple[int, ...]
    tensors: dict[str, Tensor]


class _Single(NamedTuple):
    """A form whose body is one call."""

    key: str
    form: Form
    call: Call

    def fit(self, asked: Asked) -> _Fit | None:
        """Return the form's dims and its parameters' values for a call; `None` if the form is another call."""
        given = [*asked.args, *DEFAULTS[asked.op][len(asked.args) :]]
        tensors = self._tensors(given, asked.op)
        values: dict[str, int] = {}
        if tensors is None or not all(_binds(p, tensors[p.name], values) for p in self.form.parameters):
            return None
        if not values.keys() >= set(self.form.dims):
            return None
        try:
            laid_out = all(_is_laid_out(p, tensors[p.name], values) for p in self.form.parameters)
            bound = _complete(bind_call(self.call, values), asked.op)
        except ExpressionError:
            return None
        agree = [isinstance(a, Ref) or _constant(a) == b for a, b in zip(bound or (), given, strict=False)]
        if not laid_out or not all(agree):
            return None
        return _Fit(tuple(values[d] for d in self.form.dims), tensors)

    def _tensors(self, given: Sequence[Value], op: str) -> dict[str, Tensor] | None:
        """Give each of the form's parameters the tensor that stands in its place."""
        places = _complete(self.call, op)
        if places is None or len(places) != len(given):
            return None
        tensors: dict[str, Tensor] = {}
        for place, value in zip(places, given, strict=True):
            if isinstance(place, Ref) != isinstance(value, Tensor):
                return None
            if isinstance(place, Ref) and isinstance(value, Tensor):
                tensors[place.name] = value
        return tensors if tensors.keys() >= {p.name for p in self.form.parameters} else None


def _complete(call: Call, op: str) -> list[Arg | Value] | None:
    """Return a form's call with what its schema gives to the arguments that it leaves out."""
    defaults = DEFAULTS[op]
    named = {"attn_mask": 3, "dropout_p": 4, "is_causal": 5, "scale": 6, "enable_gqa": 7}
    filled: list[Arg | Value] = [*call.args, *defaults[len(call.args) :]]
    for name, value in call.kwargs:
        if named.get(name, len(filled)) >= len(filled):
            return None
        filled[named[name]] = value
    return filled


def _constant(arg: Arg | Value) -> Value:
    if isinstance(arg, Items):
        return tuple(int(item) for item in arg.items if isinstance(item, int))
    return arg if isinstance(arg, int | float | tuple) else None


def _binds(parameter: Parameter, tensor: Tensor, values: dict[str, int]) -> bool:
    """Read dims off a tensor's sizes; tell whether it has the type, as far as its sizes are plain."""
    shape = parameter.type.shape
    if len(shape) != tensor.dim() or str(tensor.dtype) != f"torch.{parameter.type.dtype}":
        return False
    return all(
        size == actual if isinstance(size, int) else values.setdefault(size, actual) == actual
        for size, actual in zip(shape, tensor.shape, strict=True)
        if isinstance(size, int) or size.isidentifier()
    )


def _is_laid_out(parameter: Parameter, tensor: Tensor, values: Mapping[str, int]) -> bool:
    shape, strides = tuple(tensor.shape), parameter.type.strides
    if shape != tuple(evaluate(size, values) for size in parameter.type.shape):
        return False
    expected = contiguous_strides(shape) if strides is None else tuple(evaluate(s, values) for s in strides)
    return same(shape, tensor.stride(), expected)


class OperatorReplay:
    """Tuned kernels of single operators; safe to use from several threads.

    Args:
        programs: Whose forms count.
        dispatcher: Chooses kernels; not strict, and nobody else's.
        device: Where calls are answered.
        coverage: Counts outcomes under the program `operators`.
    """

    def __init__(
        self, programs: Sequence[Program], dispatcher: Dispatcher, device: torch.device, coverage: Coverage
    ) -> None:
        self._dispatcher = dispatcher
        self._device = device
        self._coverage = coverage
        forms = {key: form for program in programs for key, form in program.forms.items()}
        self._singles: dict[str, list[_Single]] = {}
        for key, form in forms.items():
            if len(form.body) == len(form.results) == 1 and form.body[0].op in DEFAULTS:
                self._singles.setdefault(form.body[0].op, []).append(_Single(key, form, form.body[0]))
        self._lock = threading.Lock()
        self._known: OrderedDict[tuple[object, ...], _Known] = OrderedDict()

    @contextmanager
    def active(self) -> Iterator[None]:
        """Answer the calls of this thread."""
        with _Mode(self):
            yield

    def answer(self, reader: Callable[..., Asked | None], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Return a call's result, or `NotImplemented` when the call itself is to run."""
        try:
            asked = reader(*args, **kwargs)
        except (TypeError, AttributeError, RuntimeError):  # arguments that torch itself will judge
            return NotImplemented
        if asked is None:
            return NotImplemented
        tensors = [a for a in asked.args if isinstance(a, Tensor)]
        if any(t.device != self._device or type(t) not in {Tensor, torch.nn.Parameter} for t in tensors):
            return NotImplemented
        if torch.is_grad_enabled() and any(t.requires_grad for t in tensors):
            return NotImplemented
        if torch.is_autocast_enabled(self._device.type):  # the call itself knows its dtype then
            return NotImplemented
        known = self._find(asked)
        if known.kernel is None:
            return NotImplemented
        return self._run(known.kernel, [tensors[place] for place in known.order]).view(asked.shape)

    def _run(self, kernel: BoundKernel, inputs: list[Tensor]) -> Tensor:
        with without_autograd():
            if self._device.type != "cuda":
                return kernel(inputs)[0]
            with torch.cuda.device(self._device):
                activate(self._device)
                return kernel(inputs)[0]

    def _find(self, asked: Asked) -> _Known:
        key = (asked.op, *(_identity(a) for a in asked.args))
        with self._lock:
            known = self._known.get(key)
            if known is None:
                known = self._known[key] = self._choose(asked)
                self._coverage.add(known.tally)
                if len(self._known) > _KNOWN_AT_MOST:
                    self._coverage.retire(self._known.popitem(last=False)[1].tally)
            else:
                self._known.move_to_end(key)
            known.tally.runs += 1  # before another thread can push it out, and its count with it
        return known

    def _choose(self, asked: Asked) -> _Known:
        for single in self._singles.get(asked.op, ()):
            fit = single.fit(asked)
            if fit is not None:
                return self._bind(single, fit, asked)
        shapes = tuple(n for a in asked.args if isinstance(a, Tensor) for n in a.shape)
        reason = f"no form of the artifact is {asked.op.split('.')[1]} alone, of these sizes and strides"
        return _Known(None, (), Tally((CoverageRow(_PROGRAM, "", asked.op, shapes, "miss", "", None, (reason,), 1),)))

    def _bind(self, single: _Single, fit: _Fit, asked: Asked) -> _Known:
        parameters = single.form.parameters
        addresses = tuple((p.name, fit.tensors[p.name].data_ptr() % 256) for p in parameters if p.role != "activation")
        choice = self._dispatcher.choose(Site(single.key, fit.dims, (), addresses))
        entry = choice.selection.entry
        outcome: Outcome = "miss" if entry is None else "exact" if choice.selection.exact else "near"
        row = CoverageRow(
            program=_PROGRAM,
            form=single.key,
            label=form_label(single.form),
            dims=fit.dims,
            outcome=outcome,
            candidate="" if entry is None else entry.candidate,
            tuned_at=None if entry is None else entry.dims,
            reasons=choice.selection.reasons,
            calls=1,
        )
        places = [id(a) for a in asked.args if isinstance(a, Tensor)]
        order = tuple(places.index(id(fit.tensors[p.name])) for p in parameters)
        return _Known(None if entry is None else BoundKernel(choice.kernel), order, Tally((row,)))


def _identity(value: Value) -> object:
    if isinstance(value, Tensor):
        return value.shape, value.stride(), value.dtype, value.data_ptr() % 256
    return value


class _Mode(TorchFunctionMode):
    def __init__(self, replay: OperatorReplay) -> None:
        super().__init__()
        self._replay = replay

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        reader = READERS.get(func)
        if reader is not None:
            result = self._replay.answer(reader, args, kwargs or {})
            if result is not NotImplemented:
                return result
        return func(*args, **(kwargs or {}))
