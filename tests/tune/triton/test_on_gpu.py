"""Every CUDA family's kernels on a real GPU, launched as the runtime launches them, against float64."""

from collections.abc import Callable
from itertools import islice

import pytest
import torch
from attention_forms import causal_form, decode_form, sdpa_form
from cancelling import cancelling
from devices import current_cuda_target
from form_runs import fill, on_gpu, relative_error, run_body
from product_forms import batched, linear, matrices, product
from row_forms import argmax, gelu_chain, rms_norm, softmax

from tune_model.extract.task import NumericRules, Task
from tune_model.runtime.execution.binding import bind_kernel
from tune_model.runtime.program import Form
from tune_model.runtime.replay import slot_sizes, unmet
from tune_model.tune.candidate import Built, Candidate, Effort, label
from tune_model.tune.families import families_for, family_named
from tune_model.tune.measuring.inputs import copy_layout
from tune_model.tune.relayout import relaid_form, relay
from tune_model.tune.target import CpuTarget

pytestmark = pytest.mark.gpu


def check(
    form: Form,
    family_name: str,
    count: int = 3,
    make: Callable[[Form], list[torch.Tensor]] = fill,
    **chosen: object,
) -> None:
    """Build the first configurations and compare each with the body in float64, and with the body's own error.

    Args:
        form: Concrete.
        family_name: Which family.
        count: How many configurations.
        make: Fills the inputs.
        chosen: Values that configurations must have to count.
    """
    target = current_cuda_target()
    task = Task(form, NumericRules())
    family = family_named(family_name)
    refusal = family.accepts(task, target)
    assert refusal is None, refusal
    inputs = [on_gpu(t) for t in make(form)]
    exact = run_body(form, [t.double() if t.is_floating_point() else t.clone() for t in inputs])
    baseline = run_body(form, [t.clone() for t in inputs])
    ran = 0
    configs = family.configurations(task, target, Effort.THOROUGH)
    for config in islice((c for c in configs if chosen.items() <= dict(c).items()), count):
        built = family.build(task, config, target)
        if not isinstance(built, Built):
            assert built.reason in {"shared memory", "spills"}, (label(Candidate(family_name, config)), built)
            continue
        sizes = slot_sizes(relaid_form(form, built.kernel.layouts))
        assert not [p for r in built.kernel.requires if (p := unmet(r, sizes, {}))]
        relaid, layouts = relaid_form(form, built.kernel.layouts), built.kernel.layouts
        bound = bind_kernel(built.kernel, relaid, built.code, torch.device("cuda"))
        results = bound(relay(form, tuple(copy_layout(t) for t in inputs), layouts))
        torch.cuda.synchronize()
        ran += 1
        for result, wanted, own in zip(results, exact, baseline, strict=True):
            if not wanted.is_floating_point():
                assert torch.equal(result, own), label(Candidate(family_name, config))
                continue
            limit = 2 * relative_error(own, wanted) + torch.finfo(result.dtype).eps
            assert relative_error(result, wanted) <= limit, label(Candidate(family_name, config))
    assert ran


@pytest.mark.parametrize("tail", ["", "bias", "residual", "gelu", "swiglu"])
@pytest.mark.parametrize("m", [1, 3])
def test_gemv(m: int, tail: str):
    check(linear(m, 1536, 4096, tail=tail), "triton_gemv")


@pytest.mark.parametrize("tail", ["", "residual", "swiglu"])
@pytest.mark.parametrize("m", [1, 16, 50, 257])
def test_matmul(m: int, tail: str):
    check(linear(m, 1536, 2048, tail=tail), "triton_matmul", 8)


@pytest.mark.parametrize("tail", ["bias", "residual", "swiglu"])
@pytest.mark.parametrize(
    ("family", "m"),
    [("triton_gemv", 1), ("triton_gemv", 3), ("triton_matmul", 16), ("triton_matmul", 257), ("triton_split_k", 16)],
)
def test_a_weight_stored_as_its_transpose(family: str, m: int, tail: str):
    check(linear(m, 1536, 2048, tail=tail), family, 4, layout="transposed")


@pytest.mark.parametrize(("store", "layout"), [(False, "plain"), (False, "transposed"), (True, "plain")])
@pytest.mark.parametrize(("m", "tail"), [(257, "residual"), (2048, ""), (1025, "swiglu")])
def test_tiles_fetched_through_descriptors(m: int, tail: str, store: bool, layout: str):
    check(linear(m, 4096, 1544, tail=tail), "triton_persistent", 3, store=store, layout=layout)


@pytest.mark.parametrize("store", [False, True])
@pytest.mark.parametrize("m", [257, 1025])
def test_two_halves_joined_in_one_tile(m: int, store: bool):
    check(linear(m, 2056, 1544, tail="swiglu"), "triton_persistent", 4, store=store, joined=True)


@pytest.mark.parametrize(
    ("m", "splits"), [(m, splits) for m in (5, 16, 50) for splits in (1, 2, 4)] + [(128, 1), (128, 4)]
)
def test_few_rows_fetched_through_descriptors(m: int, splits: int):
    # Near the front of the list are sums by the last program, and with few rows by a second launch.
    for last_adds in (False,) if splits == 1 else (True, False) if m < 128 else (True,):
        mode = {"split_k": splits, "last_adds": last_adds}
        check(linear(m, 4096 if m < 128 else 1536, 4096, tail="residual"), "triton_persistent", 2, **mode)


@pytest.mark.parametrize("tail", ["", "residual", "swiglu"])
@pytest.mark.parametrize("family", ["triton_matmul", "triton_persistent"])
def test_a_row_has_the_same_bits_in_any_batch(family: str, tail: str):
    rules = NumericRules(batch_invariant=True)
    target = current_cuda_target()
    whole = linear(300, 1536, 4096, tail=tail)
    inputs = [t.cuda() for t in fill(whole)]
    configs = list(family_named(family).configurations(Task(whole, rules), target, Effort.BALANCED))
    compared = 0
    for config in configs[:: max(1, len(configs) // 5)]:
        found = []
        for rows in (300, 64, 17, 1):
            form = linear(rows, 1536, 4096, tail=tail)
            built = family_named(family).build(Task(form, rules), config, target)
            if not isinstance(built, Built):
                continue
            given = [
                t[:rows].contiguous() if p.role == "activation" else t
                for p, t in zip(form.parameters, inputs, strict=True)
            ]
            (result,) = bind_kernel(built.kernel, form, built.code, torch.device("cuda"))(given)
            found.append(result)
        for result in found[1:]:
            assert torch.equal(result, found[0][: len(result)]), label(Candidate(family, config))
            compared += 1
    assert compared


@pytest.mark.parametrize("k", [4096, 65536])
@pytest.mark.parametrize(
    ("family", "m"),
    [
        ("triton_gemv", 1),
        ("triton_matmul", 16),
        ("triton_matmul", 256),
        ("triton_split_k", 16),
        ("triton_persistent", 16),
        ("triton_persistent", 256),
        ("aten_transposed", 256),
    ],
)
def test_long_sums_that_cancel(family: str, m: int, k: int):
    """Terms are hundreds of times the size of what is left of them; the library's error is the measure."""
    check(linear(m, 512, k), family, 6, cancelling)


@pytest.mark.parametrize("layout", ["plain", "transposed"])
@pytest.mark.parametrize(
    ("family", "m"), [("triton_gemv", 1), ("triton_matmul", 16), ("triton_split_k", 16), ("triton_persistent", 50)]
)
def test_weights_asked_for_before_the_wait(family: str, m: int, layout: str):
    check(linear(m, 1544, 2056, tail="swiglu"), family, 3, prefetch=True, layout=layout)


@pytest.mark.parametrize("m", [1, 64, 300])
def test_the_library_over_a_weight_stored_as_its_transpose(m: int):
    check(linear(m, 1536, 2048, tail="residual"), "aten_transposed", 1)
    check(linear(m, 1536, 2048, tail="residual"), "triton_epilogue", 4, layout="transposed")


@pytest.mark.parametrize("layout", ["plain", "transposed"])
@pytest.mark.parametrize("m", [1, 64, 300])
def test_a_merged_projection_in_halves(m: int, layout: str):
    check(linear(m, 1536, 2048, tail="swiglu"), "library_halves", 2, layout=layout)


@pytest.mark.parametrize("layout", ["plain", "transposed"])
@pytest.mark.parametrize("tail", ["", "bias"])
@pytest.mark.parametrize("m", [1, 64, 300])
def test_a_merged_projection_in_parts(m: int, tail: str, layout: str):
    check(linear(m, 1536, 2048, tail=tail), "aten_parts", 4, layout=layout)


def test_a_product_and_a_sum_in_one_call_of_the_library():
    check(batched(6, 70, 96, 136, "bfloat16", tail="residual"), "aten_addition", 1)
    check(batched(6, 1, 96, 136, "float32", tail="residual"), "aten_addition", 1)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_batches(dtype: str):
    check(batched(6, 70, 96, 136, dtype, tail="gelu"), "triton_matmul", 6)
    check(batched(6, 1, 96, 136, dtype), "triton_gemv", 4)
    check(batched(6, 70, 96, 136, dtype, a=(136, 6 * 136, 1), b=(96 * 136, 1, 136)), "triton_matmul", 6)


@pytest.mark.parametrize("last_adds", [True, False])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_split_k_of_batches(dtype: str, last_adds: bool):
    check(batched(3, 20, 96, 4096, dtype, tail="residual"), "triton_split_k", 4, last_adds=last_adds)


@pytest.mark.parametrize("a", [None, (1, 72)])
@pytest.mark.parametrize("b", [None, (1, 256)])
def test_all_four_orders_of_the_operands(a: tuple[int, int] | None, b: tuple[int, int] | None):
    for dtype in ("bfloat16", "float32"):
        check(matrices(72, 192, 256, a, b, dtype), "triton_matmul", 6)
        check(matrices(72, 192, 256, a, b, dtype), "triton_split_k", 4)


@pytest.mark.parametrize(("n", "k"), [(1000, 777), (31, 80)])
def test_ragged_matmul(n: int, k: int):
    check(linear(33, n, k, "float16", tail="bias"), "triton_matmul", 8)
    check(linear(2, n, k, "float16", tail="bias"), "triton_gemv", 8)


def test_float32_and_contiguous_columns():
    check(product(70, 512, 300), "triton_matmul")
    check(product(1, 512, 300), "triton_gemv")


@pytest.mark.parametrize("tail", ["", "residual", "swiglu"])
def test_split_k(tail: str):
    check(linear(16, 1024, 4096, tail=tail), "triton_split_k", 6)


@pytest.mark.parametrize(("rows", "columns"), [(1, 4096), (5, 100), (2048, 4096), (3, 40000)])
def test_rows(rows: int, columns: int):
    check(rms_norm(rows, columns), "triton_rows", 12)


def test_softmax_and_argmax():
    check(softmax(64, 3000), "triton_rows", 12)
    check(softmax(4, 131072, "bfloat16"), "triton_rows", 6)
    check(argmax(2, 128256), "triton_rows", 6)


def test_pointwise():
    check(gelu_chain(300, 1000), "triton_pointwise", 6)


@pytest.mark.parametrize("batch", [1, 7])
def test_decode_attention(batch: int):
    form = decode_form(
        batch=batch,
        heads=32,
        kv_heads=8,
        head_dim=128,
        length=1088,
        context=(0, 1087),
        dtype="bfloat16",
        scale=128**-0.5,
    )
    check(form, "triton_decode_attention", 12)


def test_decode_attention_with_window_and_cap():
    form = decode_form(batch=4, length=700, context=(0, 699), dtype="bfloat16", window=128, softcap=30.0)
    check(form, "triton_decode_attention", 6)


def test_prefill_attention_backends():
    check(causal_form(batch=2, heads=32, kv_heads=8, head_dim=128, length=300, max_length=512), "sdpa", 4)


@pytest.mark.parametrize("masked", [False, True])
def test_encoder_attention_backends(masked: bool):
    check(sdpa_form(batch=3, heads=12, head_dim=64, length=77, masked=masked), "sdpa", 4)


def test_the_baseline_runs_every_form():
    for form in (linear(5, 64, 64, tail="swiglu"), rms_norm(4, 64), decode_form()):
        check(form, "aten", 1)


def test_only_cuda_families_are_listed_for_a_gpu():
    names = [family.name for family in families_for(current_cuda_target())]
    assert names[0] == "aten"
    cpu = CpuTarget("x86_64", (), "cpu", 1, 1, 1, "g++", "2.11")
    assert not {"triton_gemv", "sdpa"} & {family.name for family in families_for(cpu)}


@pytest.mark.parametrize("tail", ["residual", "gelu", "swiglu"])
@pytest.mark.parametrize("m", [1, 257, 1024])
def test_library_product_and_generated_rest(m: int, tail: str):
    check(linear(m, 1536, 2048, tail=tail), "triton_epilogue", 3)
