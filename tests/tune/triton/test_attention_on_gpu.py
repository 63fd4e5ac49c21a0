"""Attention kernels on a real GPU, bound and launched as the runtime does, against float64."""

import pytest
import torch
from attention_forms import causal_form, chunk_form, decode_form, sdpa_form, turned_form
from devices import current_cuda_target
from form_runs import fill, on_gpu, relative_error, run_body

from tune_model.extract.task import NumericRules, Task
from tune_model.runtime.execution.binding import bind_kernel
from tune_model.runtime.program import Form
from tune_model.tune.candidate import Built, Candidate, Effort, label
from tune_model.tune.families import sdpa, triton_decode_attention, triton_flash_attention

pytestmark = pytest.mark.gpu

DECODE, FLASH, SDPA = triton_decode_attention.FAMILY, triton_flash_attention.FAMILY, sdpa.FAMILY
LLAMA = {"heads": 32, "kv_heads": 8, "head_dim": 128, "dtype": "bfloat16"}


def check(family, form: Form, change=None, most: int = 14, tolerance: float = 8e-3, *, appended: bool = False) -> None:
    """Run some configurations; `appended` keys are made, so caches are near the exact ones instead of equal."""
    inputs = fill(form)
    if change is not None:
        change(inputs)
    task, target = Task(form, NumericRules()), current_cuda_target()
    exact = [t.double() if t.is_floating_point() else t.clone() for t in inputs]
    expected = run_body(form, exact)[0]
    configs = list(family.configurations(task, target, Effort.BALANCED))
    seen = {pair: config for config in reversed(configs) for pair in config}
    ran = 0
    for config in list(dict.fromkeys([*configs[:3], *seen.values()]))[:most]:
        built = family.build(task, config, target)
        if not isinstance(built, Built):
            assert built.reason in {"spills", "registers", "shared memory"}, (label(Candidate("", config)), built)
            continue
        bound = bind_kernel(built.kernel, form, built.code, torch.device("cuda"))
        for _ in range(2):  # counters must be back at zero
            mine = [on_gpu(t) for t in inputs]
            try:
                result = bound(mine)[0]
            except RuntimeError:
                if family is not SDPA:  # a backend may refuse a shape
                    raise
                break
            torch.cuda.synchronize()
            assert relative_error(result.cpu(), expected) < tolerance, label(Candidate(family.name, config))
            for got, wanted in zip(mine, exact, strict=True):
                near = appended and relative_error(got.cpu(), wanted) < 1e-3
                assert near or torch.equal(got.cpu().double(), wanted.double())
        else:
            ran += 1
    assert ran


@pytest.mark.parametrize("batch", [1, 5])
def test_decode(batch: int):
    form = decode_form(batch=batch, **LLAMA, length=3000, context=(0, 2999), scale=128**-0.5)
    check(DECODE, form, most=24)


@pytest.mark.parametrize("normal", [False, True])
@pytest.mark.parametrize("batch", [1, 5])
def test_decode_that_turns_its_heads(batch: int, normal: bool):
    form = turned_form(batch=batch, **LLAMA, length=3000, context=(0, 2999), normal=normal)
    check(DECODE, form, most=24, appended=True)


def test_decode_of_ragged_rows():
    form = decode_form(batch=4, **LLAMA, length=1500, context=(0, 1499), scale=128**-0.5)

    def positions(inputs: list[torch.Tensor]) -> None:
        inputs[4][:, 0] = torch.tensor([0, 63, 64, 1499])

    check(DECODE, form, positions, most=24)


def in_order(inputs: list[torch.Tensor]) -> None:
    """Give every token of a prompt a place of its own in the cache."""
    inputs[4].copy_(torch.arange(inputs[4].shape[1]).expand_as(inputs[4]))


def test_a_position_that_the_predecessor_has_just_written():
    """Keys are asked for at the position of the last step; the step itself is of this one."""
    form = decode_form(batch=4, **LLAMA, length=1500, context=(0, 1499), scale=128**-0.5)
    task, target = Task(form, NumericRules()), current_cuda_target()
    configs = DECODE.configurations(task, target, Effort.BALANCED)
    built = DECODE.build(task, next(c for c in configs if ("prefetch", True) in c), target)
    assert isinstance(built, Built), built
    bound = bind_kernel(built.kernel, form, built.code, torch.device("cuda"))
    inputs = fill(form)
    inputs[4][:, 0] = torch.tensor([0, 100, 700, 1300])
    exact = [t.double() if t.is_floating_point() else t.clone() for t in inputs]
    mine = [on_gpu(t) for t in inputs]
    bound(list(mine))
    run_body(form, exact)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        mine[4].add_(17)
        result = bound(list(mine))[0]
    for _ in range(4):
        graph.replay()
        torch.cuda.synchronize()
        exact[4].add_(17)
        assert relative_error(result.cpu(), run_body(form, exact)[0]) < 8e-3
        assert torch.equal(mine[0].cpu().double(), exact[0])


@pytest.mark.parametrize("length", [1, 5, 77, 300])
def test_prefill(length: int):
    form = causal_form(batch=2, **LLAMA, length=length, max_length=512)
    check(FLASH, form, in_order)
    check(SDPA, form, in_order)


@pytest.mark.parametrize(("window", "softcap"), [(100, None), (None, 20.0), (64, 30.0)])
def test_windows_and_caps(window, softcap):
    check(FLASH, causal_form(**LLAMA, length=333, max_length=512, window=window, softcap=softcap), in_order)


@pytest.mark.parametrize("window", [None, 128])
def test_sinks(window):
    check(FLASH, causal_form(**LLAMA, length=333, max_length=512, window=window, sinks=True), in_order)
    check(DECODE, decode_form(batch=3, **LLAMA, length=1500, context=(0, 1499), window=window, sinks=True), most=24)


def test_a_chunk_over_the_cache():
    def positions(inputs: list[torch.Tensor]) -> None:
        inputs[4][0] = torch.arange(40)
        inputs[4][1] = torch.arange(700, 740)

    check(FLASH, chunk_form(**LLAMA, new=40, length=800), positions)


@pytest.mark.parametrize("shape", [(3, 1, 1, 130), (3, 1, 130, 130), (1, 4, 130, 130)], ids=str)
@pytest.mark.parametrize("kind", ["bool", "bfloat16"])
def test_masks(kind: str, shape: tuple[int, ...]):
    form = sdpa_form(batch=3, head_dim=64, length=130, mask=(kind, shape), dtype="bfloat16")

    def visible(inputs: list[torch.Tensor]) -> None:
        if kind == "bool":
            inputs[3][..., 0] = True

    check(FLASH, form, visible)
    check(SDPA, form, visible)
