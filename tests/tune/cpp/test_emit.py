import pytest
import torch
from cpp_kernels import Library
from form_builder import run_results
from loop_catalogue import FORMS, special_inputs, tolerance

from tune_model.runtime.program import Form
from tune_model.tune.cpp.emit import Shape
from tune_model.tune.loops.ir import LoopNest
from tune_model.tune.loops.lower import lower
from tune_model.tune.machine.cpu import probe_cpu


@pytest.fixture(scope="module")
def forms() -> dict[str, Form]:
    return {name: make() for name, make in FORMS.items()}


def compiled(forms: dict[str, Form], shape: Shape) -> Library:
    nests = {}
    for name, form in forms.items():
        nest = lower(form)
        assert isinstance(nest, LoopNest), (name, nest)
        nests[name] = nest
    return Library(nests, probe_cpu(), shape)


@pytest.fixture(scope="module")
def library(forms: dict[str, Form]) -> Library:
    return compiled(forms, Shape(2, "all", 64))


@pytest.fixture(scope="module")
def other_library(forms: dict[str, Form]) -> Library:
    return compiled({n: f for n, f in forms.items() if f.kind == "reduction"}, Shape(1, "none", 1 << 30))


def check(library: Library, form: Form, name: str) -> None:
    for inputs in special_inputs(form):
        for result, got, expected in zip(
            form.results, library.run(name, form, inputs), run_results(form, inputs), strict=True
        ):
            bound = tolerance(name, expected.dtype)
            torch.testing.assert_close(
                got, expected, rtol=bound, atol=bound, equal_nan=True, msg=lambda m, r=result: f"{r.name}: {m}"
            )


@pytest.mark.parametrize("name", list(FORMS))
def test_as_aten(library: Library, forms: dict[str, Form], name: str) -> None:
    check(library, forms[name], name)


def test_another_shape_of_the_same_reductions(other_library: Library, forms: dict[str, Form]) -> None:
    for name in other_library.entries:
        check(other_library, forms[name], name)
