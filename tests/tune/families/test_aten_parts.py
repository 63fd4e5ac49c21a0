"""A merged projection run as the layers it was made of: the values, where they lie, and who may be divided how."""

import pytest
import torch
from devices import cuda_target
from family_runs import built, refusals
from form_runs import fill, relative_error, run_body
from product_forms import batched, linear

from tune_model.extract.task import NumericRules, Task
from tune_model.runtime.execution.binding import bind_kernel
from tune_model.runtime.program import Form
from tune_model.tune.candidate import Effort, Rejected
from tune_model.tune.families.aten_parts import FAMILY, divisions
from tune_model.tune.machine.cpu import probe_cpu
from tune_model.tune.relayout import relaid_form, relay
from tune_model.tune.target import Target

HOPPER, CPU = cuda_target(), probe_cpu()


@pytest.mark.parametrize("target", [HOPPER, CPU], ids=["cuda", "cpu"])
@pytest.mark.parametrize("tail", ["", "bias"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_division_gives_the_values_of_the_merged_product(target: Target, tail: str, dtype: str):
    form, other = linear(7, 192, 80, dtype, tail=tail), linear(1, 192, 80, dtype, tail=tail)
    seen = set()
    for config, made in built(FAMILY, form, target, Effort.THOROUGH):
        layouts = made.kernel.layouts
        seen.add((dict(config)["parts"], dict(config)["layout"]))
        for one in (form, other):
            assert not refusals(made, relaid_form(one, layouts))
            inputs = fill(one)
            (exact,) = run_body(one, [t.double() for t in inputs])
            (own,) = run_body(one, inputs)
            kernel = bind_kernel(made.kernel, relaid_form(one, layouts), {}, torch.device("cpu"))
            (result,) = kernel(relay(one, tuple(inputs), layouts))
            assert result.is_contiguous()
            limit = 2 * relative_error(own, exact) + torch.finfo(result.dtype).eps
            assert relative_error(result, exact) <= limit, config
    assert {parts for parts, _ in seen} == {"128+32+32", "64+64+64", "96+96", "96+48+48"}
    assert {layout for _, layout in seen} == ({"plain", "transposed"} if target is HOPPER else {"plain"})


@pytest.mark.parametrize(
    ("n", "expected"),
    [
        (6144, (4096, 1024, 1024)),  # Llama-3-8B: 32 heads, 8 of keys and values
        (1280, (1024, 128, 128)),  # one of eight ranks of Llama-3-70B: 8 heads, 1
        (2304, (768, 768, 768)),  # BERT-base: as many
        (2048, (1024, 1024)),  # keys and values alone
        (4608, (3584, 512, 512)),  # Qwen2.5-7B: 28 heads, 4
    ],
)
def test_the_division_of_a_known_model_is_among_them(n: int, expected: tuple[int, ...]):
    found = divisions(n)
    assert expected in found
    assert all(sum(sizes) == n and min(sizes) > 0 for sizes in found)
    assert len(set(found)) == len(found)


@pytest.mark.parametrize(
    ("form", "why"),
    [
        (linear(4, 64, 32, tail="residual"), "alone"),
        (linear(4, 64, 32, tail="swiglu"), "alone"),
        (linear(4, 128256, 32), "no merged layers'"),
        (linear(4, 1000, 32), "no merged layers'"),
        (batched(2, 4, 64, 32), "linear layers"),
    ],
)
def test_what_is_no_merged_projection_is_refused(form: Form, why: str):
    refused = FAMILY.accepts(Task(form, NumericRules()), HOPPER)
    assert isinstance(refused, Rejected)
    assert why in refused.detail


def test_a_short_search_meets_the_commonest_divisions():
    task = Task(linear(64, 6144, 256), NumericRules())
    quick = [dict(c) for c in FAMILY.configurations(task, HOPPER, Effort.QUICK)]
    assert quick[0] == {"parts": "4096+1024+1024", "layout": "plain"}
    balanced = [dict(c)["parts"] for c in FAMILY.configurations(task, HOPPER, Effort.BALANCED)]
    assert {"4096+1024+1024", "2048+2048+2048", "3072+3072"} <= set(balanced)
    assert len(balanced) <= 8
