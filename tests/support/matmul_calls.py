"""A small tuned program of one matmul form, and the calls that any server may make of it.

Rows are batch x sequence, both free; inputs come with any strides, offset and size. What runs is a legal kernel or the
form's own operators, and the values are right.
"""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from form_builder import FormBuilder

from tune_model.extract.task import NumericRules, Plan, Task
from tune_model.runtime.execution.executor import Executor
from tune_model.runtime.program import (
    Apply,
    Form,
    Input,
    Output,
    Parameter,
    Program,
    Symbol,
    TensorType,
    Weight,
    bind_form,
    fingerprint,
)
from tune_model.runtime.replay import Entry, Replay
from tune_model.runtime.weights.transforms import bind_weights
from tune_model.tune.candidate import Built, Candidate, Config, Effort, Family, label
from tune_model.tune.relayout import apply_layouts
from tune_model.tune.target import Target

K, N = 80, 96
MOST = 4096


class Call(NamedTuple):
    """One call: how many rows, and how its two inputs lie in memory."""

    name: str
    batch: int
    sequence: int
    lay: Callable[[torch.Tensor], torch.Tensor]


def _plain(x: torch.Tensor) -> torch.Tensor:
    return x


def _off_by_one(x: torch.Tensor) -> torch.Tensor:
    """Contiguous, but starting one element into its memory: no 16-byte address."""
    memory = x.new_empty(x.numel() + 1)
    return memory[1:].view(x.shape).copy_(x)


def _every_other(x: torch.Tensor) -> torch.Tensor:
    memory = x.new_full((*x.shape[:-1], 2 * x.shape[-1]), math.nan)
    return memory[..., ::2].copy_(x)


def _padded_rows(x: torch.Tensor) -> torch.Tensor:
    """Rows three elements further apart than they are long."""
    memory = x.new_full((*x.shape[:-1], x.shape[-1] + 3), math.nan)
    return memory[..., :-3].copy_(x)


def _crosswise(x: torch.Tensor) -> torch.Tensor:
    return x.permute(2, 1, 0).contiguous().permute(2, 1, 0)


def _repeated(x: torch.Tensor) -> torch.Tensor:
    """One row, seen everywhere."""
    return x[:1, :1].expand(x.shape) if x.numel() else x


CALLS = (
    Call("no batch", 0, 7, _plain),
    Call("no rows", 3, 0, _plain),
    Call("one row", 1, 1, _plain),
    Call("between the tuned sizes", 3, 7, _plain),
    Call("beyond the tuned sizes", 5, 61, _plain),
    Call("an odd address", 2, 8, _off_by_one),
    Call("an odd address, one row", 1, 1, _off_by_one),
    Call("every other element", 2, 9, _every_other),
    Call("rows apart", 4, 4, _padded_rows),
    Call("crosswise", 2, 8, _crosswise),
    Call("the same row everywhere", 4, 16, _repeated),
)


def form_of(tail: str, dtype: str) -> Form:
    """A linear layer over a free number of rows, and what follows it."""
    b = FormBuilder("matmul")
    x, w = b.input((3, K), dtype), b.input((N * 2 if tail == "swiglu" else N, K), dtype, role="weight")
    y = b.call("linear.default", x, w)
    match tail:
        case "residual":
            form = b.form(b.call("add.Tensor", b.input((3, N), dtype), y))
        case "swiglu":
            gate, up = b.call("slice.Tensor", y, 1, 0, N), b.call("slice.Tensor", y, 1, N, 2 * N)
            form = b.form(b.call("mul.Tensor", b.call("silu.default", gate), up))
        case "":
            form = b.form(y)
        case _:
            form = b.form(b.call("gelu.default", y))
    free = tuple(_freed(p) for p in form.parameters)
    return Form(form.kind, ("d0",), free, form.body, tuple(_freed(r) for r in form.results))


def _freed(parameter: Parameter) -> Parameter:
    if parameter.role != "activation":
        return parameter
    return Parameter(parameter.name, TensorType(parameter.type.dtype, ("d0", *parameter.type.shape[1:])))


def program_of(form: Form) -> Program:
    """A program that applies the form once to [batch, sequence, k] inputs."""
    key = fingerprint(form)
    inputs, weights, names = [], [], []
    for parameter in form.parameters:
        names.append(parameter.name)
        if parameter.role == "weight":
            weights.append(Weight(parameter.name, parameter.type, (f"{parameter.name}.weight",)))
        else:
            shape = ("b", "s", *parameter.type.shape[1:])
            inputs.append(Input(parameter.name, TensorType(parameter.type.dtype, shape)))
    (result,) = form.results
    made = TensorType(result.type.dtype, ("b", "s", *result.type.shape[1:]))
    symbols = (Symbol("b", 0, MOST, "a0", 0), Symbol("s", 0, MOST, "a0", 1))
    apply = Apply(key, tuple(names), ("y",), ("b*s",))
    return Program(
        "forward", symbols, tuple(inputs), tuple(weights), (), {key: form}, (apply,), {"y": made}, (Output("y", "y"),)
    )


def first_builds(
    family: Family, form: Form, target: Target, sizes: Sequence[int], chosen: dict[str, object]
) -> list[tuple[int, Config, Built]]:
    """A family's first configuration with the values chosen that builds, at every size it accepts."""
    found = []
    for rows in sizes:
        task = Task(bind_form(form, (rows,)), NumericRules())
        if family.accepts(task, target) is not None:
            continue
        for config in family.configurations(task, target, Effort.THOROUGH):
            if not chosen.items() <= dict(config).items():
                continue
            built = family.build(task, config, target)
            if isinstance(built, Built):
                found.append((rows, config, built))
                break
    return found


class Server:
    """An executor over what a family built, and its float64 reference."""

    def __init__(
        self, family: str, form: Form, builds: Sequence[tuple[int, Config, Built]], device: str, *, offset: int = 0
    ) -> None:
        """Store weights as the kernels want them; `offset` moves them so many elements off their address."""
        (layouts,) = {built.kernel.layouts for _, _, built in builds}
        plan = apply_layouts(Plan((program_of(form),), (), (), ()), {fingerprint(form): layouts})
        (program,) = plan.programs
        (key,) = program.forms
        entries = tuple(
            Entry((rows,), "task", label(Candidate(family, config)), built.kernel, 1.0, 1.0, 1.0, 1.0)
            for rows, config, built in builds
        )
        generator = torch.Generator().manual_seed(3)
        self.form = form
        self.device = device
        self.weights = {
            w.sources[0]: (torch.randn(w.type.shape, generator=generator) * K**-0.5).to(getattr(torch, w.type.dtype))
            for w in program_of(form).weights
        }
        bound = bind_weights([program], self.weights, device)
        if offset:
            bound = {name: _moved(tensor, offset) for name, tensor in bound.items()}
        code = {digest: data for _, _, built in builds for digest, data in built.code.items()}
        self.executor = Executor(program, bound, {}, Replay({key: entries}), code, device)

    def check(self, call: Call) -> str:
        """Make a call and compare; returns how it was served: `exact`, `near` or `miss`."""
        generator = torch.Generator().manual_seed(len(call.name))
        given: dict[str, torch.Tensor] = {}
        for item in self.executor.program.inputs:
            shape = (call.batch, call.sequence, item.type.shape[2])
            plain = torch.randn(shape, generator=generator).to(getattr(torch, item.type.dtype)).to(self.device)
            given[item.name] = call.lay(plain)
        before = self.executor.coverage.totals()
        result = self.executor.run(given)["y"]
        if self.device == "cuda":
            torch.cuda.synchronize()
        expected = self._reference(given)
        assert tuple(result.shape) == tuple(expected.shape), call.name
        if expected.numel():
            error = (result.double().cpu() - expected).norm() / expected.norm()
            assert error <= 4 * torch.finfo(result.dtype).eps, (call.name, float(error))
        after = self.executor.coverage.totals()
        return next(outcome for outcome in after if after[outcome] != before[outcome])

    def _reference(self, given: dict[str, torch.Tensor]) -> torch.Tensor:
        from form_runs import run_body

        slots = []
        for parameter in self.form.parameters:
            if parameter.role == "weight":
                slots.append(self.weights[f"{parameter.name}.weight"].double())
            else:
                slots.append(given[parameter.name].cpu().double().flatten(0, 1))
        (made,) = run_body(self.form, slots)
        return made.view(*given["a0"].shape[:2], made.shape[-1])


def _moved(tensor: torch.Tensor, offset: int) -> torch.Tensor:
    """Copy a tensor to an address that nothing may be assumed of, with its strides."""
    memory = tensor.new_empty(tensor.untyped_storage().nbytes() // tensor.itemsize + offset)
    return memory.as_strided(tensor.shape, tensor.stride(), offset).copy_(tensor)
