import math

import pytest
import torch
from tuning_fakes import linear_form

from tune_model.runtime.program import Form, Parameter, TensorType, ValueRange, bind_form
from tune_model.tune.measuring.inputs import copies_for, copy_layout, make_inputs, make_outputs, poison, read_bytes
from tune_model.tune.measuring.reference import Expected, compare

CPU = torch.device("cpu")


def form_of(*parameters: Parameter, results: tuple[Parameter, ...] = ()) -> Form:
    return Form("attention", (), parameters, (), results)


def test_values_have_the_scale_that_keeps_results_like_activations():
    form = bind_form(linear_form(), (512,))
    ((x, w),) = make_inputs(form, CPU, 1)
    assert x.std().item() == pytest.approx(1.0, rel=0.05)
    assert w.std().item() == pytest.approx(16**-0.5, rel=0.1)
    assert (x @ w.T).std().item() == pytest.approx(1.0, rel=0.1)


def test_equal_seeds_give_equal_values_and_others_do_not():
    form = bind_form(linear_form(), (4,))
    a, b, c = (make_inputs(form, CPU, seed)[0] for seed in (1, 1, 2))
    assert torch.equal(a[0], b[0])
    assert not torch.equal(a[0], c[0])


def test_strides_gaps_and_overlaps_are_as_the_type_says():
    types = [
        TensorType("float32", (4, 3), (1, 4)),
        TensorType("float32", (4, 3), (10, 2)),
        TensorType("float32", (4, 3), (0, 1)),
        TensorType("bfloat16", (2, 0)),
    ]
    ((*values,),) = make_inputs(form_of(*(Parameter(f"a{i}", t) for i, t in enumerate(types))), CPU, 0)
    assert [v.stride() for v in values[:3]] == [(1, 4), (10, 2), (0, 1)]
    assert not any(torch.isnan(v).any() for v in values)
    assert torch.equal(values[2][0], values[2][3])
    for value in values:
        copied = copy_layout(value)
        assert copied.stride() == value.stride()
        assert torch.equal(copied, value)
        assert value.numel() == 0 or copied.data_ptr() != value.data_ptr()


def test_only_weights_and_caches_are_distinct_memory_in_each_copy():
    form = bind_form(linear_form(), (4,))
    sets = make_inputs(form, CPU, 0, copies=3)
    assert len({s[0].data_ptr() for s in sets}) == 1
    assert len({s[1].data_ptr() for s in sets}) == 3
    assert torch.equal(sets[0][1], sets[2][1])


def test_copies_fill_what_is_to_be_rotated_over():
    form = bind_form(linear_form(), (4,))
    assert read_bytes(form) == 32 * 16 * 4
    activations = 4 * (16 + 32) * 4
    assert copies_for(form, 0) == 1
    assert copies_for(form, 5 * 2048 + activations) == 5
    assert copies_for(form, 5 * 2048 + activations + 1) == 6
    assert copies_for(form, 1 << 40) == 128


def test_a_call_over_large_activations_needs_few_copies_to_find_its_weights_cold():
    vector = Parameter("a1", TensorType("bfloat16", (8192,)), "weight")
    x, y = (Parameter(name, TensorType("bfloat16", (32768, 8192))) for name in ("a0", "t0"))
    assert copies_for(form_of(x, vector, results=(y,)), 3 * 50 << 20) == 1
    weight = Parameter("a1", TensorType("bfloat16", (8192, 2048)), "weight")
    assert copies_for(form_of(x, weight, results=(y,)), 3 * 50 << 20) == 2
    large = Parameter("a1", TensorType("bfloat16", (8192, 16384)), "weight")
    assert copies_for(form_of(x, large, results=(y,)), 3 * 50 << 20) == 1


def test_an_activation_that_is_one_row_for_all_counts_as_one_row():
    vector = Parameter("a1", TensorType("bfloat16", (1024,)), "weight")
    mask = Parameter("a0", TensorType("bfloat16", (1 << 20, 1024), (0, 1)))
    assert copies_for(form_of(mask, vector), 10 * 2048) == 9


def test_only_the_filled_part_of_a_cache_counts_as_read():
    cache = Parameter("a1", TensorType("float32", (1, 2, 1024, 8)), "cache")
    positions = Parameter("a0", TensorType("int64", (1, 1)), values=ValueRange(255, 255))
    assert read_bytes(form_of(positions, cache)) == 2 * 256 * 8 * 4


def test_integers_stay_in_their_range_and_ascend_where_they_can():
    tokens = Parameter("a0", TensorType("int64", (3, 10)), values=ValueRange(5, 40))
    context = Parameter("a1", TensorType("int64", (3, 1)), values=ValueRange(7, 7))
    crowded = Parameter("a2", TensorType("int32", (50,)), values=ValueRange(0, 3))
    unstated = Parameter("a3", TensorType("int64", (100,)))
    ((a, b, c, d),) = make_inputs(form_of(tokens, context, crowded, unstated), CPU, 0)
    assert a.min() >= 5
    assert a.max() <= 40
    assert (a.diff(dim=-1) > 0).all()
    assert torch.equal(b, torch.full((3, 1), 7))
    assert set(c.tolist()) == {0, 1, 2, 3}
    assert c.dtype == torch.int32
    assert set(d.tolist()) == {0, 1}


@pytest.mark.parametrize(
    "reference",
    [
        torch.tensor([1.0, 0.0, math.nan, math.inf], dtype=torch.float64),
        torch.tensor([0, 255, 1, 7], dtype=torch.uint8),
        torch.tensor([torch.iinfo(torch.int32).min, 0, -1, 5], dtype=torch.int32),
        torch.tensor([True, False, True, True]),
        torch.tensor([1 + 2j, 0, 3j, 1], dtype=torch.complex64),
    ],
    ids=lambda t: str(t.dtype),
)
def test_poison_is_wrong_everywhere(reference: torch.Tensor):
    """Booleans were left as the candidate before had made them."""
    dtype = "float32" if reference.is_floating_point() else str(reference.dtype).removeprefix("torch.")
    (output,) = make_outputs(form_of(results=(Parameter("t0", TensorType(dtype, (4,))),)), CPU)
    poison(output, reference)
    for index in range(4):
        found = reference.to(output.dtype).clone()
        found[index] = output[index]
        assert compare([found], (), Expected([reference], {})).worst == math.inf
