"""ATen's attention backends, each called by its own operator: flash, cuDNN, memory-efficient, plain math.

The baseline lets PyTorch choose; which one is fastest depends on length and heads. Flash, cuDNN and math read grouped
keys and values as they are. Memory-efficient would need them repeated, so it competes only where neither of the fast
two can. A backend that refuses a shape costs only itself. New keys and values are appended to the cache by a kernel of
ours: ATen's indexed write takes several.
"""

from collections.abc import Iterator

from tune_model.extract.task import Task
from tune_model.runtime.kernel import Kernel, Requirement, Within
from tune_model.runtime.program import Arg, Call, FormKind, Items, Parameter, Real, Ref, Size, TorchName
from tune_model.tune.attention import AttentionForm, read_attention
from tune_model.tune.candidate import Built, Config, Effort, Rejected
from tune_model.tune.target import CudaTarget, Target
from tune_model.tune.triton.attention_arguments import append_launch
from tune_model.tune.triton.attention_arguments import size_of as _size
from tune_model.tune.triton.launch import KernelPlan, build_kernel

__all__ = ["FAMILY", "Sdpa"]

_HALVES = {"bfloat16", "float16"}
_BIAS_MULTIPLE = 16
"""The memory-efficient kernels want rows of the bias to start at multiples of this many elements."""


class Sdpa:
    """See the module."""

    name = "sdpa"
    version = 2
    kinds: frozenset[FormKind] = frozenset({"attention"})

    def accepts(self, task: Task, target: Target) -> Rejected | None:
        """Accept attention over whole sequences without window or soft cap."""
        if not isinstance(target, CudaTarget):
            return Rejected("unsupported", "backends of CUDA")
        if task.form.kind != "attention":
            return Rejected("unsupported", f"a {task.form.kind}, not attention")
        read = read_attention(task.form)
        if isinstance(read, Rejected):
            return read
        if read.op == "cached":
            return Rejected("unsupported", "attention over a cache: no backend reads lengths on the device")
        if read.window is not None or read.softcap is not None or read.sinks is not None:
            sinks = "no" if read.sinks is None else "with"
            return Rejected("unsupported", f"window {read.window}, soft cap {read.softcap}, {sinks} sinks")
        return None

    def start(self, task: Task, target: Target) -> Config:
        """Return the first backend."""
        return next(self.configurations(task, target, Effort.QUICK))

    def configurations(self, task: Task, target: Target, effort: Effort) -> Iterator[Config]:
        """Yield every backend that can take the operands."""
        read = read_attention(task.form)
        if not isinstance(read, Rejected):
            yield from ((("backend", backend),) for backend in _backends(read))

    def build(self, task: Task, config: Config, target: Target) -> Built | Rejected:
        """State the calls; only an append is compiled."""
        read = read_attention(task.form)
        if isinstance(read, Rejected):
            return read
        calls, requires = _calls(read, str(dict(config)["backend"]))
        append = append_launch(read, {p.name: p for p in task.form.parameters}, pdl=False)
        if append is None:
            return Built(Kernel(calls, requires=requires), {})
        if not isinstance(target, CudaTarget):
            return Rejected("unsupported", "backends of CUDA")
        return build_kernel(KernelPlan((append, *calls), requires=requires), target)


def _backends(read: AttentionForm) -> tuple[str, ...]:
    halves = read.q.type.dtype in _HALVES and _size(read.q, 3) % 8 == 0
    fast = ("flash", "cudnn") if halves and read.mask is None else ("cudnn",) if halves else ()
    repeated = _size(read.q, 1) != _size(read.k, 1)
    return (*fast, *(() if fast and repeated else ("efficient",)), "math")


def _calls(read: AttentionForm, backend: str) -> tuple[tuple[Call, ...], tuple[Requirement, ...]]:
    """Return the calls of a backend and what they hold for."""
    group = _size(read.q, 1) // _size(read.k, 1)
    q, k, v = Ref(read.q.name), Ref(read.k.name), Ref(read.v.name)
    calls: list[Call] = []
    requires: list[Requirement] = [Within(f"{p.name}.size1", _size(p, 1), _size(p, 1)) for p in (read.q, read.k)]
    if read.is_causal and backend != "math":
        # These align a causal mask to the end of the keys; the form's means the start.
        requires.append(Within(f"{read.q.name}.size2 - {read.k.name}.size2", 0, 0))
    bias: Arg = None
    if read.mask is not None:
        made, bias = _bias(read, read.mask, padded=backend == "efficient")
        calls += made
    if backend == "efficient" and group > 1:
        for place, parameter in enumerate((read.k, read.v)):
            repeated, made = _repeated(parameter, group, f"r{place}")
            calls += made
            k, v = (repeated, v) if place == 0 else (k, repeated)
    scale: tuple[tuple[str, Arg], ...] = (("scale", read.scale),)
    arguments: tuple[Arg, ...]
    match backend:
        case "flash":
            op, arguments, unread = "flash_attention", (q, k, v, 0.0, read.is_causal, False), 8
        case "cudnn":
            op, arguments, unread = "cudnn_attention", (q, k, v, bias, False, 0.0, read.is_causal, False), 8
        case "efficient":
            op, arguments, unread = "efficient_attention", (q, k, v, bias, False, 0.0, read.is_causal), 3
        case _:
            op, arguments, unread = "attention_math", (q, k, v, bias, 0.0, read.is_causal, None), 1
            scale = (*scale, ("enable_gqa", group > 1))
    results = (read.out.name, *(None for _ in range(unread)))
    calls.append(Call(f"aten._scaled_dot_product_{op}.default", arguments, scale, results))
    return tuple(calls), tuple(requires)


def _repeated(parameter: Parameter, group: int, name: str) -> tuple[Ref, list[Call]]:
    """Repeat the heads of keys or values for every query head of their group."""
    batch, heads, length, dim = (Size(f"{parameter.name}.size{axis}") for axis in range(4))
    wide = Items((batch, heads, group, length, dim))
    flat = Items((batch, Size(f"{parameter.name}.size1 * {group}"), length, dim))
    calls = [
        Call("aten.unsqueeze.default", (Ref(parameter.name), 2), (), (f"{name}_grouped",)),
        Call("aten.expand.default", (Ref(f"{name}_grouped"), wide), (), (f"{name}_wide",)),
        Call("aten.reshape.default", (Ref(f"{name}_wide"), flat), (), (f"{name}_flat",)),
    ]
    return Ref(f"{name}_flat"), calls


def _bias(read: AttentionForm, mask: Parameter, *, padded: bool) -> tuple[list[Call], Ref]:
    """Turn a mask into an additive bias of the queries' dtype, over every head, its rows aligned where asked."""
    calls: list[Call] = []
    bias = Ref(mask.name)
    dtype = TorchName("dtype", read.q.type.dtype)
    if mask.type.dtype == "bool":
        calls += [
            Call("aten.logical_not.default", (bias,), (), ("b_out",)),
            Call("aten.zeros_like.default", (bias,), (("dtype", dtype),), ("b_zero",)),
            Call("aten.masked_fill.Scalar", (Ref("b_zero"), Ref("b_out"), Real("-inf")), (), ("b_bias",)),
        ]
        bias = Ref("b_bias")
    elif mask.type.dtype != read.q.type.dtype:
        calls.append(Call("aten._to_copy.default", (bias,), (("dtype", dtype),), ("b_bias",)))
        bias = Ref("b_bias")
    keys = f"{read.k.name}.size2"
    if padded and _size(mask, len(mask.type.shape) - 1) > 1:
        missing = Size(f"({_BIAS_MULTIPLE} - {keys} % {_BIAS_MULTIPLE}) % {_BIAS_MULTIPLE}")
        calls += [
            Call("aten.constant_pad_nd.default", (bias, Items((0, missing))), (), ("b_padded",)),
            Call("aten.slice.Tensor", (Ref("b_padded"), -1, 0, Size(keys)), (), ("b_aligned",)),
        ]
        bias = Ref("b_aligned")
    shape = Items((*(Size(f"{read.q.name}.size{axis}") for axis in range(3)), Size(keys)))
    calls.append(Call("aten.expand.default", (bias, shape), (), ("b_expanded",)))
    return calls, Ref("b_expanded")


FAMILY = Sdpa()
