"""The generated families from task to result, as the tuner builds them and the runtime binds them."""

import pytest
import torch
from family_runs import built, compare, refusals, run
from form_builder import FormBuilder, random_inputs, run_results
from loop_catalogue import FORMS, layer_norm, rms_norm, rope, softmax

from tune_model.extract.task import NumericRules, Task
from tune_model.runtime.program import Form
from tune_model.tune.candidate import Built, Effort, Rejected
from tune_model.tune.families import cpp_pointwise, cpp_rows
from tune_model.tune.machine.cpu import probe_cpu
from tune_model.tune.target import CudaTarget

TARGET = probe_cpu()


def first(module: object, form: Form) -> Built:
    task = Task(form, NumericRules())
    made = module.FAMILY.build(task, module.FAMILY.start(task, TARGET), TARGET)
    assert isinstance(made, Built), made
    return made


def gelu_chain(rows: int, dtype: str = "float32", columns: int = 300) -> Form:
    b = FormBuilder()
    x, y = b.input((rows, columns), dtype), b.input((columns,), dtype)
    return b.form(b.call("gelu.default", b.call("add.Tensor", x, y)))


def test_every_configuration_of_a_norm() -> None:
    form = layer_norm("float32")
    for _, made in built(cpp_rows.FAMILY, form, TARGET, Effort.QUICK):
        compare(made, form, random_inputs(form), 3e-6)


@pytest.mark.parametrize("rows", [0, 1, 7, 600])
def test_one_kernel_serves_every_number_of_rows(rows: int) -> None:
    for module, make in ((cpp_rows, layer_norm), (cpp_pointwise, lambda _, rows: gelu_chain(rows))):
        made, form = first(module, make("float32", rows=6)), make("float32", rows=rows)
        assert not refusals(made, form)
        compare(made, form, random_inputs(form), 3e-6)
        assert refusals(made, make("float32", rows=rows)) == []


def test_other_columns_are_refused() -> None:
    assert refusals(first(cpp_rows, layer_norm("float32", columns=45)), layer_norm("float32", columns=46))


def test_rope_serves_other_batches_and_lengths() -> None:
    made, form = first(cpp_pointwise, rope()), rope(shape=(3, 70, 4, 24))
    assert not refusals(made, form)
    compare(made, form, random_inputs(form), 3e-6)


def norm_error(got: torch.Tensor, exact: torch.Tensor) -> float:
    return float((got.double() - exact).norm() / exact.norm())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("name", ["layer_norm", "softmax", "gelu", "rms_norm", "rope"])
def test_nearer_than_twice_aten(name: str, dtype: str) -> None:
    """What a candidate must pass before it is timed: twice the extern's error plus one unit in the last place."""
    make = {"layer_norm": layer_norm, "softmax": softmax, "rms_norm": rms_norm, "rope": rope}
    form = gelu_chain(40, dtype) if name == "gelu" else make[name](dtype)
    inputs = random_inputs(form)
    exact = run_results(_in_float64(form), [t.double() for t in inputs])
    made = first(cpp_pointwise if form.kind == "pointwise" else cpp_rows, form)
    unit = torch.finfo(getattr(torch, dtype)).eps
    for got, plain, reference in zip(run(made, form, inputs), run_results(form, inputs), exact, strict=True):
        assert norm_error(got, reference) <= 2 * norm_error(plain, reference) + unit


def _in_float64(form: Form) -> Form:
    """Return the same body with its casts to other floats taken out."""
    calls = tuple(
        type(c)("aten.clone.default", c.args, (), c.results) if c.op == "aten._to_copy.default" else c
        for c in form.body
    )
    return type(form)(form.kind, (), form.parameters, calls, form.results)


def test_two_runs_give_the_same_bits() -> None:
    form = FORMS["long rows"]()
    made, inputs = first(cpp_rows, form), random_inputs(form)
    for one, two in zip(run(made, form, inputs), run(made, form, inputs), strict=True):
        assert torch.equal(one, two)


def test_refusals_have_reasons() -> None:
    cuda = CudaTarget(90, "", 132, 0, 0, 0, 0, 0, "580", "", "2.11", "3.6")
    task = Task(layer_norm("float32"), NumericRules())
    assert cpp_rows.FAMILY.accepts(task, cuda) == Rejected("unsupported", "a CPU kernel")
    assert cpp_pointwise.FAMILY.accepts(task, TARGET) is not None
    assert cpp_rows.FAMILY.accepts(Task(gelu_chain(3), NumericRules()), TARGET) is not None
