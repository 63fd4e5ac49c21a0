import pytest
import torch
from cpp_kernels import Library
from form_builder import run_results
from loop_catalogue import FORMS, special_inputs, tolerance

from tune_model.runtime.program import Form
from tune_model.tune.cpp.emit import Shape
from tune_model.tune.loops.ir import LoopNest
from tune_model.tune.loops.lower import lower
from tune_model.tune.probe_cpu import probe_cpu

SHAPES = {"plain": Shape(1, "none", 16384), "unrolled": Shape(4, "all", 64)}


@pytest.fixture(scope="module")
def forms() -> dict[str, Form]:
    return {name: make() for name, make in FORMS.items()}


@pytest.fixture(scope="module", params=list(SHAPES))
def library(request: pytest.FixtureRequest, forms: dict[str, Form]) -> Library:
    nests = {}
    for name, form in forms.items():
        nest = lower(form)
        assert isinstance(nest, LoopNest), (name, nest)
        nests[name] = nest
    return Library(nests, probe_cpu(), SHAPES[request.param])


@pytest.mark.parametrize("name", list(FORMS))
def test_as_aten(library: Library, forms: dict[str, Form], name: str) -> None:
    form = forms[name]
    for inputs in special_inputs(form):
        for result, got, expected in zip(
            form.results, library.run(name, form, inputs), run_results(form, inputs), strict=True
        ):
            bound = tolerance(name, expected.dtype)
            torch.testing.assert_close(
                got, expected, rtol=bound, atol=bound, equal_nan=True, msg=lambda m, r=result: f"{r.name}: {m}"
            )
