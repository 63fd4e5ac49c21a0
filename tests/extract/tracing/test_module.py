import msgspec
import pytest
import torch
from small_models import inputs

from tune_model.extract.request import FactorySource, Phase, Request
from tune_model.extract.tracing.front_end import GridError, SourceError, TraceError
from tune_model.extract.tracing.module import trace_module
from tune_model.runtime.execution.executor import Executor
from tune_model.runtime.replay import Replay
from tune_model.runtime.weights.transforms import bind_weights


class Recurrent(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        state = torch.zeros_like(x[0])
        for row in range(x.shape[0]):
            state = torch.tanh(state + x[row])
        return state


class NeedsValues(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(8, 8)
        self.largest = self.linear.weight.abs().max().item()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) / self.largest


class BranchesOnData(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + 1 if x.sum() > 0 else x - 1


class Pairs(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.view(2, -1, 8).sum(0)


def make_pairs() -> torch.nn.Module:
    return Pairs()


def make_recurrent() -> torch.nn.Module:
    return Recurrent()


def make_needs_values() -> torch.nn.Module:
    torch.manual_seed(0)
    return NeedsValues()


def make_branching() -> torch.nn.Module:
    return BranchesOnData()


def request(name: str, *rows: int) -> Request:
    phase = Phase("forward", {"rows": rows})
    return Request(FactorySource(f"{__name__}:{name}"), "float32", "forward", (phase,), inputs(x=("rows", 8)))


@pytest.fixture(autouse=True)
def importable(monkeypatch):
    """Tests are imported from files; factories are imported by name."""
    import sys

    monkeypatch.setitem(sys.modules, __name__, sys.modules.get(__name__) or _module())


def _module():
    from types import SimpleNamespace

    return SimpleNamespace(**globals())


def test_weights_buffers_and_constants_are_told_apart():
    mixed = msgspec.structs.replace(request("x", 2, 5), source=FactorySource("small_models:make_mixed"))
    (trace,) = trace_module(mixed)
    sources = {w.sources[0] for w in trace.program.weights}
    assert sources == {
        *("inner.weight", "inner.bias", "tied.bias"),
        *("norm.weight", "norm.bias", "norm.running_mean", "norm.running_var"),
    }
    assert torch.equal(trace.constants["offset"], torch.arange(8.0))
    assert [o.name for o in trace.program.outputs] == ["first", "best", "at", "all"]


def test_a_module_whose_constructor_reads_its_weights_is_built_with_memory():
    (trace,) = trace_module(request("make_needs_values", 2, 5))
    assert trace.notes[-1] == "built with memory: the factory fails without"
    module = make_needs_values()
    weights = bind_weights([trace.program], module, "cpu")
    x = torch.randn(3, 8)
    seen = Executor(trace.program, weights, trace.constants, Replay({}), {}, "cpu").run({"x": x})
    assert torch.allclose(seen["output"], module(x))


def test_a_loop_over_a_size_is_traced_at_the_grid_s_only_value():
    (trace,) = trace_module(request("make_recurrent", 4))
    assert trace.program.inputs[0].type.shape == (4, 8)
    assert trace.program.symbols == ()
    assert "forward: rows is fixed at 4: the model specialises it" in trace.notes
    x = torch.randn(4, 8)
    seen = Executor(trace.program, {}, trace.constants, Replay({}), {}, "cpu").run({"x": x})
    assert torch.equal(seen["output"], Recurrent()(x))


def test_sizes_that_the_model_can_divide_are_enough():
    (trace,) = trace_module(request("make_pairs", 4, 8))
    assert trace.program.values[trace.program.outputs[0].value].shape == ("rows // 2", 8)


@pytest.mark.parametrize(
    ("request_", "error", "says"),
    [
        (request("make_pairs", 4, 7), TraceError, r"does not run at rows 7: \['rows', 8\] is viewed as"),
        (request("make_recurrent", 4, 8), TraceError, r"'x', dim 0: rows became the constant \d"),
        (request("make_branching", 4), TraceError, "cannot be traced"),
        (msgspec.structs.replace(request("make_recurrent", 4), inputs=()), SourceError, "list them under inputs"),
        (msgspec.structs.replace(request("make_recurrent", 4), task="causal-lm"), TraceError, "transformers model"),
        (
            msgspec.structs.replace(request("make_recurrent", 4), inputs=inputs(y=("rows",), z=(4,))),
            TraceError,
            "cannot be",
        ),
        (
            msgspec.structs.replace(request("make_recurrent", 4), inputs=inputs(x=("row", 8))),
            GridError,
            "the grid has values for rows; the sizes of its inputs are row",
        ),
        (
            msgspec.structs.replace(request("make_recurrent", 4), inputs=inputs(x=(4, 8))),
            GridError,
            "the grid has values for rows; the sizes of its inputs are none: all are fixed",
        ),
    ],
)
def test_modules_that_cannot_be_traced_are_refused(request_, error, says):
    with pytest.raises(error, match=says):
        trace_module(request_)
