"""cuBLASLt's algorithms: stored by attributes, made again from these, right in every layout, none without a GPU."""

from collections import Counter

import msgspec
import pytest
import torch
from devices import current_cuda_target
from form_runs import fill, relative_error, run_body
from product_forms import linear

from tune_model.extract.task import NumericRules, Task
from tune_model.runtime.execution.binding import bind_kernel
from tune_model.runtime.execution.dispatch import Dispatcher, Site
from tune_model.runtime.kernel import Kernel, LibraryAlgorithm, LibraryMatmul
from tune_model.runtime.launch.cublaslt import CublasLtError, Problem, installed_version, open_cublaslt
from tune_model.runtime.launch.machine_code import CodeLoader
from tune_model.runtime.program import Form, fingerprint
from tune_model.runtime.replay import Entry, Replay
from tune_model.tune.candidate import Built, Effort, Rejected
from tune_model.tune.families.cublaslt import FAMILY
from tune_model.tune.library_algorithms import proposals, variations
from tune_model.tune.machine.cuda import offline_cuda
from tune_model.tune.relayout import relaid_form, relay

WEIGHT = Problem(48, 512, 1024, 1024, 1024, 512, "bfloat16", b_by_columns=True)


def test_a_gpu_that_is_not_here_has_no_algorithms():
    """Planning for a GPU must not list what only that GPU's library can."""
    task = Task(linear(16, 512, 256), NumericRules())
    refused = FAMILY.accepts(task, offline_cuda(90))
    assert isinstance(refused, Rejected)
    assert "on the GPU itself" in refused.detail
    assert list(FAMILY.configurations(task, offline_cuda(90), Effort.THOROUGH)) == []


def test_a_stored_algorithm_is_passed_over_in_another_version_of_the_library():
    """The same attributes may be another kernel there: the form's own operators run instead."""
    form = linear(4, 8, 16, "float32")
    x, w, y = (p.name for p in (*form.parameters, *form.results))
    step = LibraryMatmul(x, w, y, 4, 8, 16, 16, 16, "float32", LibraryAlgorithm(1), version=1, b_by_columns=True)
    key = fingerprint(form)
    replay = Replay({key: (Entry((), "task", "cublaslt", Kernel((step,)), 1.0, 2.0, 1.9, 2.1),)})
    dispatcher = Dispatcher({key: form}, replay, CodeLoader({}), torch.device("cpu"), strict=False)
    choice = dispatcher.choose(Site(key, (), (), ()))
    assert choice.selection.entry is None
    assert [type(step).__name__ for step in choice.kernel.steps] == ["Call"]


def test_a_step_survives_the_wire():
    algorithm = LibraryAlgorithm(66, tile=393, stages=36, split_k=2, reduction=1, custom=5, cluster_shape=3)
    step = LibraryMatmul("a0", "a1", "t0", "a0.size0", 8, 16, "a0.stride0", 16, "bfloat16", algorithm, 130200)
    kernel = Kernel((step,))
    assert msgspec.json.decode(msgspec.json.encode(kernel), type=Kernel) == kernel


@pytest.mark.gpu
def test_an_algorithm_is_remade_from_its_attributes():
    library = open_cublaslt(0)
    found = library.search(WEIGHT, workspace_bytes=32 << 20, at_most=16)
    assert found
    for algorithm, needed in found:
        assert library.workspace_bytes(WEIGHT, algorithm) == needed
    unknown = msgspec.structs.replace(found[0][0], id=9999)
    with pytest.raises(CublasLtError, match="algorithm 9999"):
        library.workspace_bytes(WEIGHT, unknown)
    assert installed_version()


@pytest.mark.gpu
def test_variations_are_new_and_legal():
    known = {choice.algorithm for choice in proposals(WEIGHT)}
    more = list(variations(WEIGHT, 20))
    assert not known & {choice.algorithm for choice in more}
    assert len({choice.algorithm for choice in more}) == len(more)


def _check(form: Form, count: int) -> Counter[str]:
    """Run the first configurations like the tuner does; return how many ran in each layout."""
    task, target = Task(form, NumericRules()), current_cuda_target()
    assert FAMILY.accepts(task, target) is None
    inputs = tuple(t.cuda() for t in fill(form))
    exact = run_body(form, [t.double() for t in inputs])
    own = run_body(form, list(inputs))
    ran: Counter[str] = Counter()
    for config in list(FAMILY.configurations(task, target, Effort.BALANCED))[:count]:
        built = FAMILY.build(task, config, target)
        assert isinstance(built, Built), built
        layouts = built.kernel.layouts
        bound = bind_kernel(built.kernel, relaid_form(form, layouts), built.code, torch.device("cuda"))
        results = bound(relay(form, inputs, layouts))
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = bound(relay(form, inputs, layouts))
        graph.replay()
        torch.cuda.synchronize()
        for result, again, wanted, plain in zip(results, captured, exact, own, strict=True):
            limit = 2 * relative_error(plain, wanted) + torch.finfo(result.dtype).eps
            assert relative_error(result, wanted) <= limit, config
            assert torch.equal(result, again), config
        ran[str(dict(config)["layout"])] += 1
    return ran


@pytest.mark.gpu
@pytest.mark.parametrize("tail", ["", "bias", "residual", "gelu", "swiglu"])
@pytest.mark.parametrize(("m", "n", "k"), [(1, 1536, 2048), (50, 1024, 512), (257, 768, 768)])
def test_values_in_both_layouts(m: int, n: int, k: int, tail: str):
    ran = _check(linear(m, n, k, tail=tail), 6)
    assert ran["plain"]
    assert ran["transposed"]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_other_types(dtype: str):
    assert _check(linear(70, 512, 300, dtype, tail="bias"), 4)
