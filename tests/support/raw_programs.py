"""Raw programs of small modules, and running programs on the CPU with no kernels at all."""

from collections.abc import Callable, Mapping

import torch
from torch.export import Dim

from tune_model.extract.tracing.import_graph import Interface, NamedInput, import_program
from tune_model.runtime.execution.executor import Executor
from tune_model.runtime.program import Program
from tune_model.runtime.replay import Replay
from tune_model.runtime.weights.transforms import bind_weights

Example = tuple[torch.Tensor, tuple[int | str, ...]]


class Function(torch.nn.Module):
    """A function of inputs and of weights `w0`, `w1`, ... of given shapes."""

    def __init__(self, function: Callable[..., object], *shapes: tuple[int, ...], dtype: torch.dtype = torch.float32):
        super().__init__()
        self.function = function
        random = torch.Generator().manual_seed(0)
        for i, shape in enumerate(shapes):
            value = torch.randn(shape, generator=random).to(dtype)
            self.register_parameter(f"w{i}", torch.nn.Parameter(value))

    def forward(self, *inputs: torch.Tensor) -> object:
        return self.function(*inputs, *self.parameters())


def raw_program(module: Function, **inputs: Example) -> Program:
    """Trace a function; an input is an example and what its dims are called (integers stay fixed)."""
    module = module.eval()
    dynamic = [{i: Dim.AUTO for i, d in enumerate(dims) if isinstance(d, str)} for _, dims in inputs.values()]
    example = tuple(t for t, _ in inputs.values())
    exported = torch.export.export(module, example, dynamic_shapes=(tuple(dynamic),), strict=False)
    outputs = exported.graph_signature.output_specs
    names = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    interface = Interface(
        phase="forward",
        inputs=tuple(NamedInput(name, dims) for name, (_, dims) in inputs.items()),
        outputs=tuple(f"out{i}" for i in range(len(outputs))),
        weights={name: name for name in names},
        maximum={},
    )
    return import_program(exported, interface).program


def run(
    program: Program,
    inputs: Mapping[str, torch.Tensor],
    weights: Mapping[str, torch.Tensor] | None = None,
    constants: Mapping[str, torch.Tensor] | None = None,
    **hints: int,
) -> list[torch.Tensor]:
    """Run every step with ATen; forms run their bodies."""
    bound = bind_weights([program], dict(weights or {}), "cpu") if program.weights else {}
    executor = Executor(program, bound, constants or {}, Replay({}), {}, "cpu")
    return list(executor.run(inputs, hints).values())


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Relative Frobenius error, in float64."""
    difference = actual.double() - expected.double()
    return float(difference.norm() / expected.double().norm().clamp_min(1e-30))


def ops(program: Program) -> list[str]:
    """Operator names of a raw program's steps, without namespaces and overloads of `default`."""
    return [s.op.removeprefix("aten.").removesuffix(".default") for s in program.steps]  # type: ignore[union-attr]
