import math

import pytest
import torch
from tuning_fakes import linear_form

from tune_model.runtime.execution.binding import bind_kernel
from tune_model.runtime.kernel import Kernel
from tune_model.runtime.program import Call, Form, Items, Parameter, Ref, TensorType, TorchName, bind_form
from tune_model.tune.measuring.inputs import make_inputs, make_outputs
from tune_model.tune.measuring.reference import Deviation, Expected, compare, expect, tolerance, widen_form

CPU = torch.device("cpu")


def bf16_norm() -> Form:
    """RMSNorm as transformers spells it: float32 inside, rounded before the weight."""
    return Form(
        "reduction",
        (),
        (
            Parameter("a0", TensorType("bfloat16", (8, 256))),
            Parameter("a1", TensorType("bfloat16", (256,)), "weight"),
        ),
        (
            Call("aten._to_copy.default", (Ref("a0"),), (("dtype", TorchName("dtype", "float32")),), ("t0",)),
            Call("aten.pow.Tensor_Scalar", (Ref("t0"), 2), results=("t1",)),
            Call("aten.mean.dim", (Ref("t1"), Items((-1,)), True), results=("t2",)),
            Call("aten.add.Tensor", (Ref("t2"), 1e-5), results=("t3",)),
            Call("aten.rsqrt.default", (Ref("t3"),), results=("t4",)),
            Call("aten.mul.Tensor", (Ref("t0"), Ref("t4")), results=("t5",)),
            Call("aten._to_copy.default", (Ref("t5"),), (("dtype", TorchName("dtype", "bfloat16")),), ("t6",)),
            Call("aten.mul.Tensor", (Ref("a1"), Ref("t6")), results=("t7",)),
        ),
        (Parameter("t7", TensorType("bfloat16", (8, 256))),),
    )


def test_the_reference_is_float64_throughout():
    form = bf16_norm()
    (inputs,) = make_inputs(form, CPU, 0)
    (result,) = expect(form, inputs, CPU).results
    x, w = (v.double() for v in inputs)
    exact = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5) * w
    assert result.dtype == torch.float64
    assert torch.equal(result, exact) or torch.allclose(result, exact, rtol=1e-12)


def test_the_baseline_passes_its_own_tolerance_and_twice_its_error_does_too():
    form = bf16_norm()
    (inputs,) = make_inputs(form, CPU, 0)
    expected = expect(form, inputs, CPU)
    results = bind_kernel(Kernel(form.body), form, {}, CPU)(inputs, make_outputs(form, CPU))
    deviation = compare(results, inputs, expected)
    assert 1e-4 < deviation.worst < 4e-3
    (allowed,) = tolerance(form, deviation)
    assert allowed == pytest.approx(2 * deviation.worst + 2**-7)


def test_float32_errors_are_seen_at_their_size():
    form = bind_form(linear_form(), (8,))
    (inputs,) = make_inputs(form, CPU, 0)
    expected = expect(form, inputs, CPU)
    right = inputs[0] @ inputs[1].T
    assert compare([right], inputs, expected).worst < 1e-6
    assert compare([right * 1.001], inputs, expected).worst == pytest.approx(1e-3, rel=1e-2)


def test_one_unwritten_element_is_infinitely_wrong():
    form = bind_form(linear_form(), (8,))
    (inputs,) = make_inputs(form, CPU, 0)
    expected = expect(form, inputs, CPU)
    result = inputs[0] @ inputs[1].T
    result[3, 5] = float("nan")
    assert compare([result], inputs, expected).worst == math.inf


@pytest.mark.parametrize(
    ("found", "reference", "error"),
    [
        ([1.0, math.nan], [1.0, math.nan], 0.0),
        ([1.0, math.inf], [1.0, math.inf], 0.0),
        ([1.0, -math.inf], [1.0, math.inf], math.inf),
        ([1.0, 5.0], [1.0, math.nan], math.inf),
        ([2.0, math.nan], [1.0, math.inf], 1.0),
        ([0.0, 0.0], [0.0, 0.0], 0.0),
        ([3.0, 4.0], [0.0, 0.0], 5.0),
    ],
)
def test_what_is_not_finite_must_not_be_finite(found: list[float], reference: list[float], error: float):
    expected = Expected([torch.tensor(reference, dtype=torch.float64)], {})
    assert compare([torch.tensor(found)], (), expected).errors == (pytest.approx(error),)


def test_integers_and_shapes_must_be_equal():
    expected = Expected([torch.tensor([1, 2])], {})
    assert compare([torch.tensor([1, 2], dtype=torch.int32)], (), expected).worst == 0.0
    assert compare([torch.tensor([1, 3])], (), expected).worst == math.inf
    assert compare([torch.tensor([[1, 2]])], (), expected).worst == math.inf


def append_form() -> Form:
    cache = TensorType("float32", (1, 2, 8, 4))
    new = TensorType("float32", (1, 2, 1, 4))
    names = ("k_cache", "v_cache", "k", "v")
    types = (cache, cache, new, new)
    parameters = tuple(
        Parameter(f"a{i}", t, "cache" if n.endswith("cache") else "activation")
        for i, (n, t) in enumerate(zip(names, types, strict=True))
    )
    positions = Parameter("a4", TensorType("int64", (1, 1)))
    call = Call("tune_model.append_kv", tuple(Ref(f"a{i}") for i in range(5)))
    copied = Call("aten.clone.default", (Ref("a2"),), results=("t0",))
    return Form("attention", (), (*parameters, positions), (call, copied), (Parameter("t0", new),))


def test_caches_that_are_written_are_compared_and_inputs_stay_as_they_were():
    form = append_form()
    (inputs,) = make_inputs(form, CPU, 0)
    before = [v.clone() for v in inputs]
    expected = expect(form, inputs, CPU)
    assert all(torch.equal(a, b) for a, b in zip(before, inputs, strict=True))
    untouched = compare([inputs[2].clone()], inputs, expected)
    assert untouched.errors[0] == 0.0
    assert untouched.errors[1] > 0.01
    bind_kernel(Kernel(form.body), form, {}, CPU)(inputs)
    assert compare([inputs[2].clone()], inputs, expected).errors == (0.0, 0.0, 0.0)
    assert len(tolerance(form, Deviation((0.0, 0.0, 0.0)))) == 3


def test_widening_touches_real_types_only():
    wide = widen_form(append_form())
    assert [p.type.dtype for p in wide.parameters] == ["float64"] * 4 + ["int64"]


def complex_form() -> Form:
    """A product of complex numbers, and one that is made complex."""
    return Form(
        "pointwise",
        (),
        (Parameter("a0", TensorType("complex64", (4, 8))), Parameter("a1", TensorType("float32", (4, 8)))),
        (
            Call("aten.to.dtype", (Ref("a1"), TorchName("dtype", "complex64")), results=("t0",)),
            Call("aten.mul.Tensor", (Ref("a0"), Ref("t0")), results=("t1",)),
        ),
        (Parameter("t1", TensorType("complex64", (4, 8))),),
    )


def test_complex_numbers_are_compared_in_both_parts():
    """They had to be equal to the last bit."""
    form = complex_form()
    (inputs,) = make_inputs(form, CPU, 0)
    expected = expect(form, inputs, CPU)
    assert expected.results[0].dtype == torch.complex128
    right = inputs[0] * inputs[1]
    deviation = compare([right], inputs, expected)
    assert 0 < deviation.worst < 1e-7
    assert tolerance(form, deviation) == (pytest.approx(2 * deviation.worst + 2**-23),)
    assert compare([right.conj()], inputs, expected).worst > 0.5
    assert compare([right.real], inputs, expected).worst == math.inf
    lost = right.clone()
    lost[0, 0] = complex(0, math.nan)
    assert compare([lost], inputs, expected).worst == math.inf
