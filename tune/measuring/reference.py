"""What a form's results should be, in float64, and how far a candidate may be from it.

The reference is the form's own body with every floating-point type widened, so roundings in the middle are dropped and
the baseline has an error too; a candidate may have twice that plus one unit in the last place of the output type.
"""

import math

import msgspec
import torch

from tune_model.runtime.execution.binding import bind_kernel
from tune_model.runtime.execution.invoke import torch_dtype
from tune_model.runtime.kernel import Kernel
from tune_model.runtime.program import Arg, Call, Form, Items, Parameter, TensorType, TorchName

__all__ = ["Deviation", "Expected", "compare", "expect", "tolerance", "widen_form"]

_WIDE = {
    **dict.fromkeys(("float32", "float16", "bfloat16", "float64"), "float64"),
    **dict.fromkeys(("complex64", "complex32", "complex128"), "complex128"),
}
"""What each dtype with roundings is computed in instead."""


class Expected:
    """Reference values of one set of inputs.

    Attributes:
        results: In the order of the form's results.
        caches: Content of every cache after the call, by parameter index.
    """

    def __init__(self, results: list[torch.Tensor], caches: dict[int, torch.Tensor]) -> None:
        self.results = results
        self.caches = caches


class Deviation(msgspec.Struct, frozen=True):
    """How far results are from the reference.

    Attributes:
        errors: Relative Frobenius error of each result, then of each cache, of complex ones over both parts; infinite
            where values are missing, or finite where the reference is not.
    """

    errors: tuple[float, ...]

    @property
    def worst(self) -> float:
        """The largest error."""
        return max(self.errors, default=0.0)


def widen_form(form: Form) -> Form:
    """Return the form computed in float64 over contiguous inputs."""
    return Form(
        form.kind,
        form.dims,
        tuple(_widen_parameter(p) for p in form.parameters),
        tuple(_widen_call(c) for c in form.body),
        tuple(_widen_parameter(p) for p in form.results),
    )


def expect(form: Form, inputs: tuple[torch.Tensor, ...], device: torch.device) -> Expected:
    """Compute the reference.

    Args:
        form: Concrete.
        inputs: One set; not changed.
        device: Where the inputs are and the work happens.
    """
    wide_form = widen_form(form)
    wide = [_widen(value) for value in inputs]
    run = bind_kernel(Kernel(wide_form.body), wide_form, {}, device)
    with torch.no_grad():
        results = list(run(wide))
    caches = {i: wide[i] for i, p in enumerate(form.parameters) if p.role == "cache"}
    return Expected(results, caches)


def compare(results: list[torch.Tensor], inputs: tuple[torch.Tensor, ...], expected: Expected) -> Deviation:
    """Compare results, and the caches that were written, with the reference.

    Where the reference is not finite (an activation that overflows, a row that a mask hides) the result must not be
    finite either, nor the other infinity; integers and booleans must be equal.
    """
    pairs = [*zip(results, expected.results, strict=True)]
    pairs += [(inputs[i], cache) for i, cache in expected.caches.items()]
    return Deviation(tuple(_error(found, reference) for found, reference in pairs))


def tolerance(form: Form, baseline: Deviation) -> tuple[float, ...]:
    """Return the largest error allowed for each result and cache."""
    types = [*(p.type for p in form.results), *(p.type for p in form.parameters if p.role == "cache")]
    return tuple(
        2.0 * error + _last_place(type_) if math.isfinite(error) else 0.0
        for error, type_ in zip(baseline.errors, types, strict=True)
    )


def _last_place(type_: TensorType) -> float:
    dtype = getattr(torch, type_.dtype)
    return float(torch.finfo(dtype).eps) if dtype.is_floating_point or dtype.is_complex else 0.0


def _error(found: torch.Tensor, reference: torch.Tensor) -> float:
    if found.shape != reference.shape:
        return math.inf
    if found.dtype.is_complex != reference.dtype.is_complex:
        return math.inf
    if not (reference.dtype.is_floating_point or reference.dtype.is_complex):
        return 0.0 if torch.equal(found, reference.to(found.dtype)) else math.inf
    wide = found.to(reference.dtype)
    finite = torch.isfinite(reference)
    if bool(finite.all()):
        difference = torch.linalg.vector_norm(wide - reference)
        size = torch.linalg.vector_norm(reference)
    else:
        odd, wanted = wide[~finite], reference[~finite]
        if bool((torch.isfinite(odd) | (odd == -wanted)).any()):
            return math.inf
        difference = torch.linalg.vector_norm((wide - reference)[finite])
        size = torch.linalg.vector_norm(reference[finite])
    error, norm = float(difference), float(size)
    if math.isnan(error):
        return math.inf
    return error / norm if norm > 0 else error


def _widen(value: torch.Tensor) -> torch.Tensor:
    # clone: a cache is written by the reference, and the inputs serve every candidate
    name = _WIDE.get(str(value.dtype).removeprefix("torch."))
    wide = value if name is None else value.to(torch_dtype(name))
    return wide.clone(memory_format=torch.contiguous_format)


def _widen_type(type_: TensorType) -> TensorType:
    return TensorType(_WIDE.get(type_.dtype, type_.dtype), type_.shape)


def _widen_parameter(parameter: Parameter) -> Parameter:
    return Parameter(parameter.name, _widen_type(parameter.type), parameter.role, parameter.values)


def _widen_arg(arg: Arg) -> Arg:
    if isinstance(arg, TorchName) and arg.kind == "dtype" and arg.name in _WIDE:
        return TorchName("dtype", _WIDE[arg.name])
    if isinstance(arg, Items):
        return Items(tuple(_widen_arg(a) for a in arg.items))
    return arg


def _widen_call(call: Call) -> Call:
    kwargs = tuple((name, _widen_arg(a)) for name, a in call.kwargs)
    return Call(call.op, tuple(_widen_arg(a) for a in call.args), kwargs, call.results)
