"""A split K whose last program adds: calls in flight never share counters, and the order of sums is fixed."""

import pytest
import torch
from devices import current_cuda_target
from form_runs import fill, relative_error, run_body
from product_forms import linear

from tune_model.extract.task import NumericRules, Task
from tune_model.runtime.execution.binding import BoundKernel, bind_kernel
from tune_model.tune.candidate import Built, Effort
from tune_model.tune.families import triton_split_k
from tune_model.tune.relayout import relaid_form, relay

pytestmark = pytest.mark.gpu


@pytest.fixture
def bound() -> tuple[BoundKernel, tuple[torch.Tensor, ...], torch.Tensor]:
    """A kernel of many programs per tile, its inputs, and what it makes of them."""
    form = linear(16, 1024, 4096, tail="residual")
    task, target = Task(form, NumericRules()), current_cuda_target()
    configs = triton_split_k.FAMILY.configurations(task, target, Effort.THOROUGH)
    config = next(c for c in configs if dict(c)["last_adds"] and dict(c)["split_k"] >= 4)
    built = triton_split_k.FAMILY.build(task, config, target)
    assert isinstance(built, Built)
    layouts = built.kernel.layouts
    kernel = bind_kernel(built.kernel, relaid_form(form, layouts), built.code, torch.device("cuda"))
    inputs = tuple(t.cuda() for t in fill(form))
    relaid = relay(form, inputs, layouts)
    (wanted,) = run_body(form, [t.double() for t in inputs])
    (own,) = run_body(form, list(inputs))
    (result,) = kernel(relaid)
    assert relative_error(result, wanted) <= 2 * relative_error(own, wanted) + torch.finfo(result.dtype).eps
    return kernel, relaid, result


def test_calls_on_two_streams_and_in_a_graph_at_once(bound):
    kernel, inputs, wanted = bound
    graph, captured = torch.cuda.CUDAGraph(), []
    with torch.cuda.graph(graph):
        captured += [kernel(inputs)[0] for _ in range(3)]
    streams = [torch.cuda.Stream() for _ in range(2)]
    results: list[torch.Tensor] = []
    torch.cuda.synchronize()
    for _ in range(50):
        graph.replay()
        for stream in streams:
            with torch.cuda.stream(stream):
                results += kernel(inputs)
    torch.cuda.synchronize()
    assert all(torch.equal(result, wanted) for result in (*results, *captured))


def test_a_first_call_inside_a_capture(bound):
    _, inputs, wanted = bound
    form = linear(16, 1024, 4096, tail="residual")
    task, target = Task(form, NumericRules()), current_cuda_target()
    config = next(
        c
        for c in triton_split_k.FAMILY.configurations(task, target, Effort.THOROUGH)
        if dict(c)["last_adds"] and dict(c)["split_k"] >= 4
    )
    built = triton_split_k.FAMILY.build(task, config, target)
    assert isinstance(built, Built)
    graph, results = torch.cuda.CUDAGraph(), []
    with torch.cuda.graph(graph):
        fresh = bind_kernel(built.kernel, relaid_form(form, built.kernel.layouts), built.code, torch.device("cuda"))
        results += fresh(inputs)
    for _ in range(3):
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(results[0], wanted)
