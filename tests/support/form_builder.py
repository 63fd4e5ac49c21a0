"""Forms written down call by call, and what their bodies compute with plain ATen."""

import math
from collections.abc import Sequence

import torch

from tune_model.runtime.program import Arg, Call, Form, FormKind, Items, Parameter, Real, Ref, TensorType, TorchName


class FormBuilder:
    """Collects parameters and calls; values are known by their `Ref`s."""

    def __init__(self, kind: FormKind = "pointwise") -> None:
        self.kind: FormKind = kind
        self.parameters: list[Parameter] = []
        self.calls: list[Call] = []
        self.count = 0

    def input(
        self, shape: Sequence[int], dtype: str = "float32", strides: Sequence[int] | None = None, **kwargs
    ) -> Ref:
        name = f"a{len(self.parameters)}"
        type_ = TensorType(dtype, tuple(shape), None if strides is None else tuple(strides))
        self.parameters.append(Parameter(name, type_, **kwargs))
        return Ref(name)

    def call(self, op: str, *args: object, results: int = 1, **kwargs: object) -> Ref | tuple[Ref, ...]:
        names = tuple(f"t{self.count + k}" for k in range(results))
        self.count += results
        plain = tuple((k, _arg(v)) for k, v in kwargs.items())
        self.calls.append(Call(f"aten.{op}", tuple(_arg(a) for a in args), plain, names))
        return Ref(names[0]) if results == 1 else tuple(Ref(n) for n in names)

    def form(self, *results: Ref) -> Form:
        draft = Form(self.kind, (), tuple(self.parameters), tuple(self.calls), ())
        tensors = run_body(draft, random_inputs(draft))
        made = tuple(
            Parameter(r.name, TensorType(str(tensors[r.name].dtype)[6:], tuple(tensors[r.name].shape))) for r in results
        )
        return Form(self.kind, (), draft.parameters, draft.body, made)


def _arg(value: object) -> Arg:
    match value:
        case list() | tuple():
            return Items(tuple(_arg(v) for v in value))
        case torch.dtype():
            return TorchName("dtype", str(value)[6:])
        case float() if not math.isfinite(value):
            return Real(str(value))
        case _:
            return value


def _plain(arg: Arg, tensors: dict[str, torch.Tensor]) -> object:
    match arg:
        case Ref(name):
            return tensors[name]
        case Items(items):
            return [_plain(a, tensors) for a in items]
        case Real(text):
            return float(text)
        case TorchName("dtype", name):
            return getattr(torch, name)
        case _:
            return arg


def run_body(form: Form, inputs: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
    """Run the body with ATen."""
    tensors = {p.name: t for p, t in zip(form.parameters, inputs, strict=True)}
    for call in form.body:
        _, name, overload = call.op.split(".")
        op = getattr(getattr(torch.ops.aten, name), overload)
        out = op(*(_plain(a, tensors) for a in call.args), **{k: _plain(a, tensors) for k, a in call.kwargs})
        outs = out if isinstance(out, (list, tuple)) else [out]
        tensors |= {n: t for n, t in zip(call.results, outs, strict=False) if n is not None}
    return tensors


def run_results(form: Form, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Run the body and return the results."""
    tensors = run_body(form, inputs)
    return [tensors[r.name] for r in form.results]


def random_inputs(form: Form, *, seed: int = 0) -> list[torch.Tensor]:
    """Make inputs of the parameters' types: normal floats, small integers, coin-flip bools."""
    generator = torch.Generator().manual_seed(seed)
    return [_random(p, generator) for p in form.parameters]


def _random(parameter: Parameter, generator: torch.Generator) -> torch.Tensor:
    type_ = parameter.type
    dtype = getattr(torch, type_.dtype)
    strides = type_.strides
    if strides is None:
        tensor = torch.empty(type_.shape, dtype=dtype)
    else:
        tensor = torch.empty_strided(type_.shape, strides, dtype=dtype)
    size = 1 + sum((s - 1) * t for s, t in zip(tensor.shape, tensor.stride(), strict=True)) if tensor.numel() else 0
    storage = tensor.as_strided((size,), (1,))
    if dtype.is_floating_point:
        storage.copy_(torch.randn(size, generator=generator, dtype=torch.float64))
        return tensor
    low, high = (0, 2) if dtype == torch.bool else (-5, 6)
    if parameter.values is not None:
        low, high = parameter.values.low, parameter.values.high + 1
    storage.copy_(torch.randint(low, high, (size,), generator=generator))
    return tensor
