from collections.abc import Callable

import pytest
import torch
from torch.export import Dim

from tune_model.extract.tracing.front_end import Trace, TraceError
from tune_model.extract.tracing.graph import import_functional
from tune_model.extract.tracing.import_graph import (
    Interface,
    MutationError,
    NamedInput,
    SpecialisedError,
    import_program,
)
from tune_model.runtime.execution.executor import Executor
from tune_model.runtime.program import Call, Ref, Size, TensorType
from tune_model.runtime.replay import Replay


class Function(torch.nn.Module):
    def __init__(self, body: Callable[..., object]) -> None:
        super().__init__()
        self.body = body

    def forward(self, x: torch.Tensor) -> tuple[object, ...]:
        returned = self.body(x)
        return returned if isinstance(returned, tuple) else (returned,)


def exported(body: Callable[..., object], *, rows: int = 3, dynamic: bool = True) -> torch.export.ExportedProgram:
    shapes = ({0: Dim.AUTO},) if dynamic else None
    with torch.no_grad():
        return torch.export.export(Function(body).eval(), (torch.ones(rows, 8),), dynamic_shapes=shapes, strict=False)


def interface(outputs: int = 1, dims: tuple[int | str, ...] = ("rows", 8)) -> Interface:
    return Interface("forward", (NamedInput("x", dims),), tuple(f"y{i}" for i in range(outputs)), {}, {})


def check(body: Callable[..., object], outputs: int = 1) -> Trace:
    """Import a function and compare at sizes it was not traced at."""
    trace = import_functional(exported(body), interface(outputs))
    executor = Executor(trace.program, {}, trace.constants, Replay({}), {}, "cpu")
    for rows in (1, 5):
        x = torch.randn(rows, 8)
        seen = executor.run({"x": x.clone()})
        expected = body(x.clone())
        for name, value in zip(seen, expected if isinstance(expected, tuple) else (expected,), strict=True):
            assert torch.equal(seen[name], value), name
    return trace


def ops(trace: Trace) -> list[str]:
    return [s.op for s in trace.program.steps if isinstance(s, Call)]


def test_calls_that_change_nothing_are_dropped():
    def body(x):
        x = torch.nn.functional.dropout(x, 0.5, training=False)
        x = x.to(torch.float32).contiguous()[:].view(x.shape[0], 8).expand(x.shape[0], 8).detach().clone()
        return x + 1

    assert ops(check(body)) == ["aten.add.Tensor"]


def test_a_copy_that_changes_the_layout_stays():
    trace = check(lambda x: x.t().contiguous() * 2)
    assert "aten.contiguous.default" in ops(trace)


def test_a_slice_that_keeps_the_size_of_nothing_is_no_identity():
    assert "aten.slice.Tensor" in ops(check(lambda x: x[:, 2:] + 1))


def test_several_results_are_values_and_unread_ones_are_nobody():
    trace = check(lambda x: x.split([2, 5, 1], dim=1)[1] + 1)
    (split,) = [s for s in trace.program.steps if s.op.startswith("aten.split")]
    assert split.results[0] is None
    assert split.results[2] is None
    assert trace.program.values[split.results[1]] == TensorType("float32", ("rows", 5), (8, 1))


def test_steps_nobody_reads_are_dropped_with_their_constants():
    def body(x):
        (x * torch.tensor([3.0])).sum()
        return x + torch.tensor([1.0])

    trace = check(body)
    assert ops(trace) == ["aten.add.Tensor"]
    assert [v.item() for v in trace.constants.values()] == [1.0]


def test_a_reshape_that_copies_copies_at_every_size():
    """At one row the reshape of a transposed tensor is a view; its strides would not be the declared ones."""
    trace = check(lambda x: (x.view(x.shape[0], 2, 4).transpose(0, 2).reshape(-1) * 2,))
    assert "aten.reshape.default" not in ops(trace)


def test_sizes_become_expressions():
    trace = check(lambda x: torch.cat([x, x]).reshape(-1, 4)[: x.shape[0] // 2])
    (cut,) = [s for s in trace.program.steps if s.op == "aten.slice.Tensor"]
    assert cut.args[1:4] == (0, 0, Size("rows // 2"))


def test_every_cast_is_spelled_alike():
    def body(x):
        other = torch.ones(1, dtype=torch.float64)
        return x.double() + x.to(other) + x.type_as(other) + x.to(dtype=torch.float64, copy=True)

    assert ops(check(body)).count("aten.to.dtype") == 4


def test_in_place_operations_are_functionalised():
    def body(x):
        y = x + 1
        y.mul_(2)
        y[:, 0] = 7.0
        return y

    with pytest.raises(MutationError, match="mul_"):
        import_program(exported(body), interface())
    trace = check(body)
    assert trace.notes == ("in-place operations were functionalised",)


def test_regions_that_set_a_mode_are_inlined():
    def body(x):
        with torch.enable_grad():
            y = x * 2
        with torch.autocast("cpu", enabled=False):
            return y + x

    assert ops(check(body)) == ["aten.mul.Tensor", "aten.add.Tensor"]


def test_an_output_may_be_an_input():
    trace = check(lambda x: (x, x + 1), outputs=2)
    assert trace.program.outputs[0].value == "x"


def test_values_never_take_the_name_of_an_input():
    trace = import_functional(
        exported(lambda x: x + 1), Interface("forward", (NamedInput("add", ("rows", 8)),), ("y",), {}, {})
    )
    (step,) = trace.program.steps
    assert step.args[0] == Ref("add")
    assert step.results == ("add_1",)


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (lambda x: x[x.sum(1) > 0] * 2, "data"),
        (lambda x: x.nonzero(), "sizes depend on data"),
    ],
)
def test_what_programs_cannot_hold_is_refused(body, says):
    with pytest.raises(TraceError, match=says):
        import_functional(exported(body), interface(2))


def test_autocast_is_refused():
    def body(x):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return x @ x.t()

    with pytest.raises(TraceError, match="autocast"):
        import_functional(exported(body), interface())


def test_a_model_that_changes_its_buffers_is_refused():
    class Counts(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("calls", torch.zeros(1))

        def forward(self, x):
            self.calls.add_(1)
            return (x + self.calls,)

    program = torch.export.export(Counts(), (torch.ones(3, 8),), strict=False)
    with pytest.raises(TraceError, match="changes calls when it runs"):
        import_functional(program, interface(dims=(3, 8)))


def test_a_symbol_that_became_a_constant_is_an_error_not_a_wrong_program():
    with pytest.raises(SpecialisedError, match="'x', dim 0: rows became the constant 3") as caught:
        import_program(exported(lambda x: x + 1, dynamic=False), interface())
    assert caught.value.symbol == "rows"
