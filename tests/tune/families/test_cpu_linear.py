import pytest
from family_runs import built, compare, refusals
from form_builder import random_inputs
from matmul_forms import LINEAR_FORMS, gelu, plain
from product_forms import linear

from tune_model.extract.task import NumericRules, Task
from tune_model.tune.candidate import Effort, Rejected
from tune_model.tune.families import cpp_epilogue, library_halves, mkl_linear, mkldnn_linear
from tune_model.tune.machine.cpu import probe_cpu
from tune_model.tune.target import CpuTarget

TARGET = probe_cpu()


@pytest.mark.parametrize("name", list(LINEAR_FORMS))
@pytest.mark.parametrize("module", [mkldnn_linear, cpp_epilogue, mkl_linear])
def test_as_aten(module: object, name: str) -> None:
    family = module.FAMILY
    form, other = LINEAR_FORMS[name](5), LINEAR_FORMS[name](9)
    if family.name == "cpp_epilogue" and name == "plain":
        assert family.accepts(Task(form, NumericRules()), TARGET) == Rejected(
            "unsupported", "nothing follows the matmul"
        )
        return
    for _, made in built(family, form, TARGET, Effort.QUICK):
        compare(made, form, random_inputs(form), 1e-5)
        if family.name == "mkl_linear":
            assert refusals(made, other)
        else:
            assert not refusals(made, other)
            compare(made, other, random_inputs(other, seed=3), 1e-5)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_merged_projection_in_halves(dtype: str) -> None:
    form, other = (linear(rows, 40, 72, dtype, tail="swiglu") for rows in (5, 9))
    ((_, made),) = built(library_halves.FAMILY, form, TARGET)
    assert [call.op for call in made.kernel.steps[:-1]] == 2 * ["aten.slice.Tensor", "aten.linear.default"]
    assert made.kernel.layouts == ()
    for one in (form, other):
        assert not refusals(made, one)
        compare(made, one, random_inputs(one), 1e-5 if dtype == "float32" else 2e-2)
    refused = library_halves.FAMILY.accepts(Task(gelu(5), NumericRules()), TARGET)
    assert isinstance(refused, Rejected)


@pytest.mark.parametrize("name", ["gelu", "swiglu"])
def test_bfloat16_matmul_of_aten(name: str) -> None:
    form = LINEAR_FORMS[name](5, "bfloat16")
    for _, made in built(cpp_epilogue.FAMILY, form, TARGET, Effort.QUICK):
        compare(made, form, random_inputs(form), 2e-2)


def test_packed_variant_without_requirements_is_there_for_the_fallback() -> None:
    for make in LINEAR_FORMS.values():
        kernels = [made.kernel for _, made in built(mkldnn_linear.FAMILY, make(5), TARGET)]
        assert all(k.layouts == (("a1", "mkldnn"),) for k in kernels)
        assert any(not k.requires for k in kernels)


def test_activation_is_fused() -> None:
    configs = [config for config, _ in built(mkldnn_linear.FAMILY, gelu(5), TARGET)]
    assert configs[0] == (("rest", "fused"),)
    assert (("rest", "fused"),) not in [c for c, _ in built(mkldnn_linear.FAMILY, plain(5), TARGET)]


def test_half_precision_needs_the_instructions() -> None:
    task = Task(plain(5, "bfloat16"), NumericRules())
    old = CpuTarget("x86_64", ("avx2", "fma"), "old", 2, 1 << 20, 1 << 25, "g++ 12.2", "2.13")
    refused = mkldnn_linear.FAMILY.accepts(task, old)
    assert refused == Rejected("unsupported", "oneDNN packs no bfloat16 on this CPU")
    new = CpuTarget("x86_64", ("avx512bw", "avx512dq", "avx512vl"), "new", 2, 1 << 20, 1 << 25, "g++ 12.2", "2.13")
    assert mkldnn_linear.FAMILY.accepts(task, new) is None
    assert mkl_linear.FAMILY.accepts(task, new) == Rejected("unsupported", "MKL packs float32, not bfloat16")


def test_the_product_is_written_over() -> None:
    """One tensor less to allocate and to move through the cache."""
    _, made = next(built(cpp_epilogue.FAMILY, gelu(5), TARGET))
    call, launch = made.kernel.steps
    assert set(launch.pointers) == set(call.results)
