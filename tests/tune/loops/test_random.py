"""Random regions through the interpreter, and compiled as C++ in one library, against ATen."""

import pytest
import torch
from cpp_kernels import Library, poisoned
from form_builder import random_inputs, run_results
from loop_interpreter import interpret
from random_forms import random_form

from tune_model.runtime.program import Form
from tune_model.runtime.replay import slot_sizes, unmet
from tune_model.tune.cpp.columns import Shape
from tune_model.tune.loops.ir import LoopNest
from tune_model.tune.loops.lower import lower
from tune_model.tune.loops.rounding import elide_rounding
from tune_model.tune.probe_cpu import probe_cpu

BOUND = {torch.float32: 2e-5, torch.float16: 2e-2, torch.bfloat16: 1e-1}


def lowered(seed: int) -> tuple[Form, LoopNest]:
    form = random_form(seed)
    nest = lower(form)
    assert isinstance(nest, LoopNest), nest
    assert [r for r in nest.requires if unmet(r, slot_sizes(form), {})] == []
    return form, nest


def close(got: list[torch.Tensor], form: Form, inputs: list[torch.Tensor]) -> None:
    for one, expected in zip(got, run_results(form, inputs), strict=True):
        bound = BOUND[expected.dtype]
        torch.testing.assert_close(one, expected, rtol=bound, atol=bound, equal_nan=True)


def check_interpreted(seed: int) -> None:
    form, nest = lowered(seed)
    inputs = random_inputs(form, seed=seed)
    for variant in (nest, elide_rounding(nest)):
        outputs = [poisoned(r) for r in form.results]
        slots = {p.name: t for p, t in zip((*form.parameters, *form.results), (*inputs, *outputs), strict=True)}
        interpret(variant, slots, slot_sizes(form))
        close(outputs, form, inputs)


def check_compiled(seeds: range) -> None:
    made = {str(seed): lowered(seed) for seed in seeds}
    library = Library(
        {name: elide_rounding(nest) for name, (_, nest) in made.items()}, probe_cpu(), Shape(2, "costly", 64)
    )
    for name, (form, _) in made.items():
        inputs = random_inputs(form, seed=int(name))
        close(library.run(name, form, inputs), form, inputs)


@pytest.mark.parametrize("seed", range(40))
def test_interpreted(seed: int) -> None:
    check_interpreted(seed)


def test_compiled() -> None:
    check_compiled(range(40))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1000, 1300, 30))
def test_many(seed: int) -> None:
    for one in range(seed, seed + 30):
        check_interpreted(one)
    check_compiled(range(seed, seed + 30))
