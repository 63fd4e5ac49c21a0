"""A split K whose last program adds: calls in flight never share counters, and the order of sums is fixed."""

import gc
from collections.abc import Callable

import pytest
import torch
from devices import current_cuda_target
from form_runs import fill, relative_error, run_body
from product_forms import linear

from tune_model.extract.task import NumericRules, Task
from tune_model.runtime.execution import executor
from tune_model.runtime.execution.binding import BoundKernel, bind_kernel
from tune_model.runtime.execution.executor import Executor
from tune_model.runtime.execution.graphs import GraphPool
from tune_model.runtime.program import Apply, Form, Input, Output, Program, Symbol, fingerprint
from tune_model.runtime.replay import Entry, Replay
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


def program_of(form: Form) -> Program:
    """A program that is one form; plans for different contexts are different plans of the same kernel."""
    key, (result,) = fingerprint(form), form.results
    names = tuple(parameter.name for parameter in form.parameters)
    return Program(
        "forward",
        (Symbol("context", 1, 64, default=1),),
        tuple(Input(parameter.name, parameter.type) for parameter in form.parameters),
        (),
        (),
        {key: form},
        (Apply(key, names, (result.name,), ()),),
        {result.name: result.type},
        (Output("out", result.name),),
    )


def run_program() -> Callable[[int], torch.Tensor]:
    """A program with a kernel that counts, at a context."""
    form = linear(16, 1024, 4096, tail="residual")
    task, target = Task(form, NumericRules()), current_cuda_target()
    for config in triton_split_k.FAMILY.configurations(task, target, Effort.THOROUGH):
        if dict(config)["last_adds"] and dict(config)["split_k"] >= 4:
            built = triton_split_k.FAMILY.build(task, config, target)
            if isinstance(built, Built) and not built.kernel.layouts:
                break
    else:
        raise AssertionError("no kernel whose last program adds")
    assert [w.zeroed for w in built.kernel.workspaces if not w.counters] == [False]
    replay = Replay({fingerprint(form): (Entry((), "task", "split", built.kernel, 1.0, 2.0, 1.5, 2.5),)})
    program = program_of(form)
    run = Executor(program, {}, {}, replay, built.code, "cuda", strict=True)
    inputs = {item.name: tensor.cuda() for item, tensor in zip(program.inputs, fill(form), strict=True)}
    return lambda context: run.run(inputs, {"context": context})["out"]


@pytest.mark.parametrize("captured_by", ["us", "others"])
def test_a_graph_is_right_after_its_plan_is_gone(captured_by: str, monkeypatch: pytest.MonkeyPatch):
    """The plan owned the counters: 128 plans later the graph counted in memory that somebody else had got."""
    monkeypatch.setattr(executor, "_PLANS_AT_MOST", 1)
    run, pool = run_program(), GraphPool(torch.device("cuda", torch.cuda.current_device()))
    wanted = run(1).clone()
    graphs = []
    for _ in range(2):
        run(1)  # as anybody warms up
        if captured_by == "us":
            graphs.append(pool.capture(lambda: run(1)))
        else:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=pool.stream):
                result = run(1)
            graphs.append((graph, result))
    run(2)  # pushes the plan out
    gc.collect()
    torch.cuda.synchronize()
    taken = []
    for stream in (torch.cuda.current_stream(), pool.stream):
        with torch.cuda.stream(stream):
            taken += [torch.full((n,), 7, dtype=torch.int32, device="cuda") for n in (16, 128, 512, 4096) * 100]
    torch.cuda.synchronize()
    for _ in range(3):
        for graph, result in graphs:
            result.zero_()
            graph.replay()
            torch.cuda.synchronize()
            assert torch.equal(result, wanted)
    assert all(bool((tensor == 7).all()) for tensor in taken)


@pytest.mark.parametrize("captured_by", ["us", "others"])
def test_no_replay_sets_counters_to_zero(captured_by: str):
    """The second graph of a plan did, with a node more for each kernel."""
    run, pool = run_program(), GraphPool(torch.device("cuda", torch.cuda.current_device()))
    graphs = []
    for _ in range(2):
        run(1)
        if captured_by == "us":
            graphs.append(pool.capture(lambda: run(1))[0])
        else:
            graphs.append(torch.cuda.CUDAGraph())
            with torch.cuda.graph(graphs[-1]):
                run(1)
    for graph in graphs:
        graph.replay()
        torch.cuda.synchronize()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            graph.replay()
            torch.cuda.synchronize()
        names = [event.name for event in profile.events() if event.device_type == torch.autograd.DeviceType.CUDA]
        assert names
        assert not [name for name in names if "memset" in name.lower() or "fill" in name.lower()]
