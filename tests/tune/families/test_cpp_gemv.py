import pytest
from family_runs import built, compare, refusals
from form_builder import random_inputs
from matmul_forms import LINEAR_FORMS, plain

from tune_model.extract.task import NumericRules, Task
from tune_model.tune.candidate import Effort, Rejected
from tune_model.tune.families import cpp_gemv
from tune_model.tune.machine.cpu import probe_cpu

TARGET = probe_cpu()


@pytest.mark.parametrize("name", list(LINEAR_FORMS))
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_as_aten_for_one_to_four_rows(name: str, dtype: str) -> None:
    made = next(m for _, m in built_first(LINEAR_FORMS[name](2, dtype)))
    for rows in (1, 2, 3, 4):
        form = LINEAR_FORMS[name](rows, dtype)
        assert not refusals(made, form)
        compare(made, form, random_inputs(form, seed=rows), {"float32": 1e-5, "bfloat16": 3e-2, "float16": 4e-3}[dtype])
    assert refusals(made, LINEAR_FORMS[name](5, dtype))


def built_first(form):
    task = Task(form, NumericRules())
    made = cpp_gemv.FAMILY.build(task, cpp_gemv.FAMILY.start(task, TARGET), TARGET)
    assert not isinstance(made, Rejected), made
    yield (), made


def test_every_configuration() -> None:
    form = LINEAR_FORMS["swiglu"](3)
    for _, made in built(cpp_gemv.FAMILY, form, TARGET, Effort.QUICK):
        compare(made, form, random_inputs(form), 1e-5)


def test_many_rows_are_refused() -> None:
    assert cpp_gemv.FAMILY.accepts(Task(plain(9), NumericRules()), TARGET) == Rejected(
        "unsupported", "9 rows; expected 1 to 4"
    )
