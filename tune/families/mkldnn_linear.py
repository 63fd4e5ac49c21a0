"""oneDNN linear layers with a weight packed once: plain, with a fused activation, or followed by generated C++.

The packed layout suits every number of rows, so the variants without requirements are also the fallback of a packed
weight. bfloat16 and float16 need instructions that not every CPU has; oneDNN refuses to pack without them.
"""

import time
from collections.abc import Iterator
from typing import Final

from tune_model.extract.task import Task
from tune_model.runtime.kernel import Kernel, KernelStep, Requirement, Within
from tune_model.runtime.program import Arg, Call, Form, FormKind, Items, Ref
from tune_model.tune.candidate import Built, Config, Effort, Rejected
from tune_model.tune.cpp.emit import Shape
from tune_model.tune.cpp.rest import build_rest
from tune_model.tune.families.aten import holds_sizes
from tune_model.tune.loops.rest import MatmulParts, lower_rest, take_apart
from tune_model.tune.target import CpuTarget, Target

__all__ = ["FAMILY", "MkldnnLinear", "packed_call", "pinned"]

_HALF_NEEDS: Final = {
    "bfloat16": ({"avx512bw", "avx512vl", "avx512dq"}, {"avx_ne_convert"}, {"bf16"}),
    "float16": ({"avx512_fp16"}, {"avx_ne_convert"}, {"fphp"}),
}

_ACTIVATIONS: Final[dict[str, tuple[str, str]]] = {
    "aten.relu.default": ("relu", ""),
    "aten.sigmoid.default": ("sigmoid", ""),
    "aten.tanh.default": ("tanh", ""),
    "aten.silu.default": ("swish", ""),
    "aten.gelu.default": ("gelu", "none"),
    "aten.hardswish.default": ("hardswish", ""),
}
_BINARY: Final = {"aten.add.Tensor": "add", "aten.mul.Tensor": "mul"}

_GRAINS = (16384, 4096, 1 << 30)


class MkldnnLinear:
    """See the module."""

    name = "mkldnn_linear"
    version = 1
    kinds: frozenset[FormKind] = frozenset({"matmul"})

    def accepts(self, task: Task, target: Target) -> Rejected | None:
        """Accept forms with one linear layer over a two-dimensional input."""
        if not isinstance(target, CpuTarget):
            return Rejected("unsupported", "a CPU kernel")
        parts = take_apart(task.form)
        if isinstance(parts, Rejected):
            return parts
        needs = _HALF_NEEDS.get(parts.type.dtype, ())
        if parts.type.dtype not in {"float32", "bfloat16", "float16"}:
            return Rejected("unsupported", f"a linear layer of {parts.type.dtype}")
        if needs and not any(need <= set(target.isa) for need in needs):
            return Rejected("unsupported", f"oneDNN packs no {parts.type.dtype} on this CPU")
        if 0 in (parts.m, parts.n, parts.k):
            return Rejected("unsupported", "an empty matmul")
        return None

    def start(self, task: Task, target: Target) -> Config:
        """Return the variant with the fewest launches."""
        return next(self.configurations(task, target, Effort.QUICK))

    def configurations(self, task: Task, target: Target, effort: Effort) -> Iterator[Config]:
        """Yield the ways to compute what follows the matmul."""
        parts = take_apart(task.form)
        if isinstance(parts, Rejected):
            return
        if parts.rest and _fused(task.form, parts) is not None:
            yield (("rest", "fused"),)
        if not isinstance(lower_rest(task.form, parts), Rejected):
            grains = _GRAINS[:1] if effort is Effort.QUICK else _GRAINS
            yield from ((("rest", "cpp"), ("grain", grain)) for grain in grains)
        yield (("rest", "aten"),)

    def build(self, task: Task, config: Config, target: Target) -> Built | Rejected:
        """State the calls; compile the rest where it is generated."""
        parts = take_apart(task.form)
        if isinstance(parts, Rejected) or not isinstance(target, CpuTarget):
            return parts if isinstance(parts, Rejected) else Rejected("unsupported", "a CPU kernel")
        began = time.perf_counter()
        values = dict(config)
        layouts = ((parts.weight, "mkldnn"),)
        if values["rest"] == "aten":
            return Built(Kernel((*packed_call(parts), *parts.rest), layouts=layouts, requires=pinned(parts)), {})
        if values["rest"] == "fused":
            steps = _fused(task.form, parts)
            if steps is None:
                return Rejected("unsupported", "oneDNN has no such activation")
            return Built(Kernel(steps, layouts=layouts, requires=pinned(parts)), {})
        rest = lower_rest(task.form, parts)
        if isinstance(rest, Rejected):
            return rest
        made = build_rest(rest, Shape(2, "costly", int(values["grain"])), target)
        if isinstance(made, Rejected):
            return made
        steps = (*packed_call(parts, product=rest.product), made[0])
        seconds = time.perf_counter() - began
        return Built(Kernel(steps, layouts=layouts, requires=rest.requires), made[1], build_s=seconds)


def packed_call(
    parts: MatmulParts, *, product: str | None = None, activation: tuple[str, str] = ("none", "")
) -> tuple[KernelStep, ...]:
    """Return oneDNN's linear layer on the packed weight."""
    bias: Arg = Ref(parts.bias) if parts.bias else None
    attr, algorithm = activation
    args = (Ref(parts.a), Ref(parts.weight), bias, attr, Items(()), algorithm)
    return (Call("mkldnn._linear_pointwise.default", args, results=(product or parts.product,)),)


def pinned(parts: MatmulParts) -> tuple[Requirement, ...]:
    """Demand the task's rows when the calls after the matmul may hold them as a number."""
    return (
        (Within(f"{parts.a}.size0", parts.m, parts.m),)
        if any(holds_sizes(c, {parts.product}) for c in parts.rest)
        else ()
    )


def _fused(form: Form, parts: MatmulParts) -> tuple[KernelStep, ...] | None:
    """Return the calls with the first one after the matmul fused into it; `None` when oneDNN does not know it."""
    if not parts.rest:
        return None
    first, others = parts.rest[0], parts.rest[1:]
    reads = [a.name for c in others for a in c.args if isinstance(a, Ref)]
    if parts.product in reads or any(r.name == parts.product for r in form.results) or len(first.results) != 1:
        return None
    activation = _ACTIVATIONS.get(first.op)
    if first.op == "aten.gelu.default" and (len(first.args) > 1 or first.kwargs):
        activation = ("gelu", str(first.args[1] if len(first.args) > 1 else dict(first.kwargs)["approximate"]))
    if activation is not None and first.args[0] == Ref(parts.product):
        return (*packed_call(parts, product=first.results[0], activation=activation), *others)
    return _fused_binary(form, parts, first, others)


def _fused_binary(
    form: Form, parts: MatmulParts, first: Call, others: tuple[Call, ...]
) -> tuple[KernelStep, ...] | None:
    """Fuse a residual of the product's own type."""
    attr = _BINARY.get(first.op)
    if attr is None or first.kwargs or len(first.args) != 2:
        return None
    other = next((a for a in first.args if a != Ref(parts.product)), None)
    types = {p.name: p.type for p in form.parameters}
    if not isinstance(other, Ref) or types.get(other.name) != parts.type:
        return None
    bias: Arg = Ref(parts.bias) if parts.bias else None
    args = (Ref(parts.a), other, Ref(parts.weight), bias, attr)
    return (Call("mkldnn._linear_pointwise.binary", args, results=first.results), *others)


FAMILY = MkldnnLinear()
